"""The last step of squeeze-and-excitation: channels are scaled by gates, in channels-last memory.

Forward    y_npc = x_npc s(a_nc) at pixel p,  s the sigmoid
Backward   dx_npc = dy_npc s(a_nc),  da_nc = s(a_nc) s(-a_nc) sum_p dy_npc x_npc

Forward schedule: tiles of pixels by channels; the gates of an image are one row, read by all its pixel tiles.
Backward schedule: the sum runs over pixels, whose rows of channels lie next to each other, so a reduction
goes down the columns of tiles. An owner of (image, channel tile) would be too few programs, N C / 64, so
pixels are split too: a program owns (image, pixel chunk, channel tile), writes dx as it goes and leaves the
sums of its columns in a slot. The second kernel adds the slots of an image and applies the sigmoid's slope
there, once to the sum instead of to each pixel. s(-a) stands for 1 - s(a), which has no digits for an open
gate.

op: se_gate
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


CHUNK = 128  # pixels of a program
TILE = {"BLOCK_P": 16, "BLOCK_C": 64}


@triton.jit
def se_gate_kernel(x_ptr, a_ptr, y_ptr, P, C, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    n = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (p[:, None] < P) & (c[None, :] < C)
    offs = (n * P + p[:, None]) * C + c[None, :]
    gate = tl.sigmoid(tl.load(a_ptr + n * C + c, mask=c < C, other=0.0).to(tl.float32))
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (x * gate[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def se_gate(x, a):
    """x: (N, H, W, C); a: (N, C)."""
    N, H, W, C = x.shape
    if a.shape != (N, C):
        raise ValueError("a has a number for each image and channel of x")
    x, a, y = x.contiguous(), a.contiguous(), torch.empty((N, H, W, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(H * W, TILE["BLOCK_P"]), triton.cdiv(C, TILE["BLOCK_C"]), N)
    se_gate_kernel[grid](x, a, y, H * W, C, **TILE)
    return y


def reference(x, a):
    return x * torch.sigmoid(a)[:, None, None, :]


SWEEP = [{"N": 64, "H": 56, "W": 56, "C": 384}, {"N": 17, "H": 97, "W": 61, "C": 250}]
SWEEP_CPU = [{"N": 2, "H": 10, "W": 20, "C": 5}, {"N": 1, "H": 3, "W": 7, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = tuple(dims[name] for name in "NHWC")
    x = torch.randn(shape, device=device, dtype=dtype)
    return x, 2 * torch.randn(dims["N"], dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def se_backward_kernel(
    x_ptr, a_ptr, dy_ptr, dx_ptr, part_ptr, P, C,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate = tl.sigmoid(tl.load(a_ptr + n * C + c, mask=c < C, other=0.0).to(tl.float32))
    total = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK_P):
        p = tl.program_id(0) * CHUNK + start + tl.arange(0, BLOCK_P)
        mask = (p[:, None] < P) & (c[None, :] < C)
        offs = (n * P + p[:, None]) * C + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, (dy * gate[None, :]).to(dx_ptr.dtype.element_ty), mask=mask)
        total += dy * x
    slot = (n * tl.num_programs(0) + tl.program_id(0)) * C
    tl.store(part_ptr + slot + c, tl.sum(total, axis=0), mask=c < C)


@triton.jit
def gate_kernel(part_ptr, a_ptr, da_ptr, chunks, C, BLOCK_G: tl.constexpr, BLOCK_C: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_G, BLOCK_C], dtype=tl.float32)
    for start in range(0, chunks, BLOCK_G):
        i = start + tl.arange(0, BLOCK_G)
        mask = (i[:, None] < chunks) & (c[None, :] < C)
        total += tl.load(part_ptr + (n * chunks + i[:, None]) * C + c[None, :], mask=mask, other=0.0)
    a = tl.load(a_ptr + n * C + c, mask=c < C, other=0.0).to(tl.float32)
    da = tl.sum(total, axis=0) * tl.sigmoid(a) * tl.sigmoid(-a)
    tl.store(da_ptr + n * C + c, da.to(da_ptr.dtype.element_ty), mask=c < C)


class SEGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a):
        x, a = x.contiguous(), a.contiguous()
        ctx.save_for_backward(x, a)
        return se_gate(x, a)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        N, H, W, C = x.shape
        dx, da = torch.empty_like(x), None
        chunks, tiles = triton.cdiv(H * W, CHUNK), triton.cdiv(C, TILE["BLOCK_C"])
        part = torch.empty((N, chunks, C), device=x.device, dtype=torch.float32)
        se_backward_kernel[(chunks, tiles, N)](x, a, dy.contiguous(), dx, part, H * W, C, CHUNK=CHUNK, **TILE)
        if ctx.needs_input_grad[1]:
            da = torch.empty_like(a)
            gate_kernel[(tiles, N)](part, a, da, chunks, C, BLOCK_G=16, BLOCK_C=TILE["BLOCK_C"])
        return dx if ctx.needs_input_grad[0] else None, da


def se_gate_autograd(x, a):
    return SEGate.apply(x, a)

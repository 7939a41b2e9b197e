"""Transformer-XL's attention scores: content, plus position scores shifted from distances to keys.

Forward    y_ij = scale (c_ij + s_{i, Q - 1 - i + j}),  i < Q queries, j < K keys; column r of s is for the
           distance r - (Q - 1) from query to key, so s has Q + K - 1 columns
Backward   dc_ij = scale dy_ij;  ds_ir = scale dy_{i, r - (Q - 1) + i} where that is a key, and 0 elsewhere

Forward schedule: a program owns (tile of rows, tile of keys). The shift is an offset of the address that
changes by one a row, so no padding, no reshape and no copy of s are needed.
Backward schedule: for a query the map from keys to distances is one to one, so its inverse is a gather as
well. A program owns a tile of distances, Q + K - 1 of them, and stores every ds once; the distances that no
key has get their zeros from masked loads. Every dy_ij is read by one lane, that of its distance, so this lane
stores dc_ij too: one read and both gradients.

op: relative_shift
schedule: gather_transpose
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_R": 8, "BLOCK_K": 128}


@triton.jit
def relative_shift_kernel(
    c_ptr, s_ptr, y_ptr, rows, Q, K, scale, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    j = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (row < rows) & (j < K)
    r = Q - 1 - row % Q + j
    c = tl.load(c_ptr + row * K + j, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(s_ptr + row * (Q + K - 1) + r, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * K + j, (scale * (c + s)).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def relative_shift(c, s, scale):
    """c: (..., Q, K); s: (..., Q, Q + K - 1) with the same leading sizes; gives the shape of c."""
    Q, K = c.shape[-2:]
    if s.shape != (*c.shape[:-1], Q + K - 1):
        raise ValueError(f"c {tuple(c.shape)} wants {Q + K - 1} distances, s is {tuple(s.shape)}")
    c, s = c.contiguous(), s.contiguous()
    y, rows = torch.empty_like(c), c.shape[:-1].numel()
    grid = (triton.cdiv(rows, TILE["BLOCK_R"]), triton.cdiv(K, TILE["BLOCK_K"]))
    relative_shift_kernel[grid](c, s, y, rows, Q, K, scale, **TILE)
    return y


def reference(c, s, scale):
    Q, K = c.shape[-2:]
    i, j = torch.arange(Q, device=c.device)[:, None], torch.arange(K, device=c.device)
    return scale * (c + s.gather(-1, (Q - 1 - i + j).expand(c.shape)))


SWEEP = [{"B": 8, "H": 8, "Q": 512, "K": 1024}, {"B": 3, "H": 4, "Q": 1001, "K": 777}]
SWEEP_CPU = [{"B": 2, "H": 2, "Q": 17, "K": 17}, {"B": 1, "H": 3, "Q": 9, "K": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, Q, K = (dims[name] for name in "BHQK")
    c = torch.randn(B, H, Q, K, device=device, dtype=dtype)
    return c, torch.randn(B, H, Q, max(0, Q + K - 1), device=device, dtype=dtype), 0.125


# ---- backward ----


@triton.jit
def relative_shift_backward_kernel(
    dy_ptr, dc_ptr, ds_ptr, rows, Q, K, scale, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    r = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    j = r - (Q - 1) + row % Q
    is_key = (row < rows) & (r < Q + K - 1) & (j >= 0) & (j < K)
    d = scale * tl.load(dy_ptr + row * K + j, mask=is_key, other=0.0).to(tl.float32)
    mask = (row < rows) & (r < Q + K - 1)
    tl.store(ds_ptr + row * (Q + K - 1) + r, d.to(ds_ptr.dtype.element_ty), mask=mask)
    tl.store(dc_ptr + row * K + j, d.to(dc_ptr.dtype.element_ty), mask=is_key)


class RelativeShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c, s, scale):
        ctx.scale, ctx.s_shape, ctx.s_dtype = scale, s.shape, s.dtype
        return relative_shift(c, s, scale)

    @staticmethod
    def backward(ctx, dy):
        dy, (Q, K) = dy.contiguous(), dy.shape[-2:]
        dc = torch.empty_like(dy)
        ds = torch.empty(ctx.s_shape, device=dy.device, dtype=ctx.s_dtype)
        rows = dy.shape[:-1].numel()
        grid = (triton.cdiv(rows, TILE["BLOCK_R"]), triton.cdiv(Q + K - 1, TILE["BLOCK_K"]))
        relative_shift_backward_kernel[grid](dy, dc, ds, rows, Q, K, ctx.scale, **TILE)
        needs = ctx.needs_input_grad
        return dc if needs[0] else None, ds if needs[1] else None, None


def relative_shift_autograd(c, s, scale):
    return RelativeShift.apply(c, s, scale)

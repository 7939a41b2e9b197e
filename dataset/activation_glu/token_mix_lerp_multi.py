"""Token shift: five mixtures of each token with the one before, the inputs of a recurrent time-mixing layer.

Forward    y_k[t] = x[t] + (x[t - 1] - x[t]) m_k for k = 1 .. 5, x[-1] = 0, m_k a number a channel
Backward   dx[t] = sum_k dy_k[t] (1 - m_k) + dy_k[t + 1] m_k, without the second term at the last t;
           dm_k = sum over samples and t of dy_k[t] (x[t - 1] - x[t])

Forward schedule: a program owns (sample, tile of time, tile of channels), reads x and x shifted once and
writes all five outputs.
Backward schedule: each x[t] went into ten outputs, five at t and five at t + 1. The owner of a tile of x
gathers them: it reads the five upstreams at t and, one row on, mostly the same cache lines, so dx is
complete and stored once. The sums of dm need the same dy_k[t] with x[t - 1] - x[t], so the same program makes
its part of all five in that read; a part is five numbers a channel for each time tile, and a second kernel
adds them. Left to autograd this is five pointwise backwards, four additions of whole tensors and a shift.

op: token_mix
schedule: gather_transpose, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_T": 32, "BLOCK_C": 64}


@triton.jit
def token_mix_kernel(
    x_ptr, m_ptr, y_ptr, T, C, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    outputs = tl.num_programs(0).to(tl.int64) * T * C  # numbers in one of the five
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (t[:, None] < T) & (c[None, :] < C)
    offs = (b * T + t[:, None]) * C + c[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(x_ptr + offs - C, mask=mask & (t[:, None] > 0), other=0.0).to(tl.float32)
    for k in tl.static_range(5):
        m = tl.load(m_ptr + k * C + c, mask=c < C, other=0.0).to(tl.float32)
        y = x + (before - x) * m[None, :]
        tl.store(y_ptr + k * outputs + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def token_mix(x, m):
    """x: (B, T, C); m: (5, C); gives (5, B, T, C)."""
    if m.shape[0] != 5:
        raise ValueError(f"{m.shape[0]} mixtures: five are made")
    x, m = x.contiguous(), m.contiguous()
    B, T, C = x.shape
    y = torch.empty((5, B, T, C), device=x.device, dtype=x.dtype)
    grid = (B, triton.cdiv(T, TILE["BLOCK_T"]), triton.cdiv(C, TILE["BLOCK_C"]))
    token_mix_kernel[grid](x, m, y, T, C, **TILE)
    return y


def reference(x, m):
    before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    return x + (before - x) * m[:, None, None]


SWEEP = [{"B": 4, "T": 1024, "C": 2048}, {"B": 3, "T": 2047, "C": 777}]
SWEEP_CPU = [{"B": 2, "T": 19, "C": 40}, {"B": 1, "T": 66, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["C"], device=device, dtype=dtype)
    return x, torch.rand(5, dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def token_mix_backward_kernel(
    x_ptr, m_ptr, dy_ptr, dx_ptr, part_ptr, T, C, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    outputs = tl.num_programs(0).to(tl.int64) * T * C  # numbers in one of the five
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (t[:, None] < T) & (c[None, :] < C)
    offs = (b * T + t[:, None]) * C + c[None, :]
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(x_ptr + offs - C, mask=mask & (t[:, None] > 0), other=0.0).to(tl.float32)
    part = part_ptr + (b * tl.num_programs(1) + tl.program_id(1)) * 5 * C
    dx = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for k in tl.static_range(5):
        m = tl.load(m_ptr + k * C + c, mask=c < C, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + k * outputs + offs, mask=mask, other=0.0).to(tl.float32)
        after = tl.load(dy_ptr + k * outputs + offs + C, mask=mask & (t[:, None] + 1 < T), other=0.0)
        dx += dy * (1 - m[None, :]) + after.to(tl.float32) * m[None, :]
        tl.store(part + k * C + c, tl.sum(dy * (before - x), axis=0), mask=c < C)
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def mixture_sum_kernel(part_ptr, dm_ptr, parts, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)  # of the 5 C numbers
    dm = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
    for start in range(0, parts, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < parts) & (j[None, :] < N)
        dm += tl.load(part_ptr + r[:, None] * N + j[None, :], mask=mask, other=0.0)
    tl.store(dm_ptr + j, tl.sum(dm, axis=0).to(dm_ptr.dtype.element_ty), mask=j < N)


class TokenMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        x, m = x.contiguous(), m.contiguous()
        ctx.save_for_backward(x, m)
        return token_mix(x, m)

    @staticmethod
    def backward(ctx, dy):
        x, m = ctx.saved_tensors
        B, T, C = x.shape
        tiles = triton.cdiv(T, TILE["BLOCK_T"])
        dx, dm = torch.empty_like(x), torch.empty_like(m)
        part = torch.empty((B * tiles, 5 * C), device=x.device, dtype=torch.float32)
        grid = (B, tiles, triton.cdiv(C, TILE["BLOCK_C"]))
        token_mix_backward_kernel[grid](x, m, dy.contiguous(), dx, part, T, C, **TILE)
        needs = ctx.needs_input_grad
        if needs[1]:
            mixture_sum_kernel[(triton.cdiv(5 * C, 64),)](part, dm, B * tiles, 5 * C, BLOCK_R=32, BLOCK_N=64)
        return dx if needs[0] else None, dm if needs[1] else None


def token_mix_autograd(x, m):
    return TokenMix.apply(x, m)

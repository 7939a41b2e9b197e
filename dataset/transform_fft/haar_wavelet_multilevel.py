"""Haar wavelet analysis of rows over several levels, packed as (approximation, coarsest details, .. finest).

Forward    A_0 = x;  A_l[i] = (A_{l-1}[2 i] + A_{l-1}[2 i + 1]) / sqrt 2,
           D_l[i] = (A_{l-1}[2 i] - A_{l-1}[2 i + 1]) / sqrt 2;   y = (A_L, D_L, .., D_1)
Backward   a sample t is in one coefficient of each level, the one at t >> l, with the weight 2^(-l/2), and in
           details with the sign of bit l - 1 of t:
           dx_t = 2^(-L/2) dA_L[t >> L] + sum_l (-1)^(t >> (l-1) & 1) 2^(-l/2) dD_l[t >> l]

Forward schedule: one launch a level on the half that is left; the approximations go to and fro between two
buffers, since the next level reads what other programs wrote.
Backward schedule: synthesis could be the same L launches in reverse, each reading what the one before wrote.
Solved for a sample, the recursion is a sum of L + 1 known places, so that the owner of a sample gathers them:
one launch, no buffers, dx stored once. Neighbours read the same coarse coefficients, which the cache serves.

op: haar_wavelet
schedule: gather_transpose
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def level_kernel(a_ptr, coarse_ptr, y_ptr, M, N, half, last, BLOCK: tl.constexpr):
    """One level of all rows: of 2 half numbers half go to `coarse` (to y at the last level) and half to y."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = e < M * half
    row, i = e // half, e % half
    even = tl.load(a_ptr + row * 2 * half + 2 * i, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(a_ptr + row * 2 * half + 2 * i + 1, mask=mask, other=0.0).to(tl.float32)
    a, d = (even + odd) * 0.7071067811865476, (even - odd) * 0.7071067811865476
    tl.store(y_ptr + row * N + half + i, d.to(y_ptr.dtype.element_ty), mask=mask)
    if last:
        tl.store(y_ptr + row * N + i, a.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(coarse_ptr + e, a, mask=mask)


@autodiff(inputs_require_grad=(0,))
def haar_wavelet(x, levels=3):
    """x: (M, N), N a multiple of 2^levels."""
    x, (M, N) = x.contiguous(), x.shape
    if levels < 1 or N % (1 << levels):
        raise ValueError(f"rows of {N} do not halve {levels} times")
    y = torch.empty_like(x)
    fine = x
    for level in range(1, levels + 1):
        half = N >> level
        coarse = torch.empty((M, half), device=x.device, dtype=torch.float32)
        grid = (max(1, triton.cdiv(M * half, 512)),)
        level_kernel[grid](fine, coarse, y, M, N, half, level == levels, BLOCK=512)
        fine = coarse
    return y


def reference(x, levels=3):
    details = []
    for _ in range(levels):
        even, odd = x[:, 0::2], x[:, 1::2]
        details.append((even - odd) * 0.5**0.5)
        x = (even + odd) * 0.5**0.5
    return torch.cat([x, *reversed(details)], dim=1)


SWEEP = [{"M": 4096, "N": 16384, "L": 6}, {"M": 8191, "N": 1000, "L": 3}]
SWEEP_CPU = [{"M": 13, "N": 48, "L": 3}, {"M": 40, "N": 14, "L": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["M"], dims["N"], device=device, dtype=dtype), dims["L"]


# ---- backward ----


@triton.jit
def synthesis_kernel(dy_ptr, dx_ptr, N, levels, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * N
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < N
    dx = tl.load(dy_ptr + row + (t >> levels), mask=mask, other=0.0).to(tl.float32)
    for step in range(levels):
        level = levels - step
        place = (N >> level) + (t >> level)
        d = tl.load(dy_ptr + row + place, mask=mask, other=0.0).to(tl.float32)
        sign = 1 - 2 * ((t >> (level - 1)) & 1)
        dx = (dx + sign.to(tl.float32) * d) * 0.7071067811865476
    tl.store(dx_ptr + row + t, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class HaarWavelet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.levels = levels
        return haar_wavelet(x, levels)

    @staticmethod
    def backward(ctx, dy):
        dy, (M, N) = dy.contiguous(), dy.shape
        dx = torch.empty_like(dy)
        synthesis_kernel[(triton.cdiv(N, 512), M)](dy, dx, N, ctx.levels, BLOCK=512)
        return dx, None


def haar_wavelet_autograd(x, levels=3):
    return HaarWavelet.apply(x, levels)

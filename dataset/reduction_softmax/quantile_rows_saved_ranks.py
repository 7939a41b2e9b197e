"""Quantiles of rows, interpolated between two neighbours in the order.

Forward    h = q (N - 1),  b = floor(h),  f = h - b;  with x_(0) <= x_(1) <= .. the row in order:
           y = (1 - f) x_(b) + f x_(b + 1)
Backward   the places i, j of x_(b), x_(b + 1) are piecewise constant:
           dx_c = (1 - f) dy [c = i] + f dy [c = j]

Forward schedule: a program owns a row; no sort: the rank of a number is how many stand before it, counted
against the row, a chunk at a time. Equal numbers are ranked by place, so ranks are a permutation and just one
lane has rank b, one b + 1. Both places are saved.
Backward schedule: the same owner, x is not read. The row is written once, zeros included, by comparing each
lane with two places, where a fill and a scatter would write it and then write into it. The two may be one
place, at q = 1 or in a row of one number, and their shares then add up to dy.

op: quantile
schedule: index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def quantile_kernel(x_ptr, y_ptr, place_ptr, N, below, f, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    rank = tl.where(cols < N, 0, BLOCK)
    for start in range(0, N, CHUNK):
        others = start + tl.arange(0, CHUNK)
        other = tl.load(x_ptr + row * N + others, mask=others < N, other=0.0).to(tl.float32)
        tied = (other[None, :] == x[:, None]) & (others[None, :] < cols[:, None])
        before = (others[None, :] < N) & ((other[None, :] < x[:, None]) | tied)
        rank += tl.sum(before.to(tl.int32), axis=1)
    above = tl.minimum(below + 1, N - 1)
    y = tl.sum(tl.where(rank == below, x, 0.0) * (1 - f) + tl.where(rank == above, x, 0.0) * f, axis=0)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty))
    tl.store(place_ptr + row * 2, tl.sum(tl.where(rank == below, cols, 0), axis=0))
    tl.store(place_ptr + row * 2 + 1, tl.sum(tl.where(rank == above, cols, 0), axis=0))


def quantile_forward(x, q):
    N = x.shape[-1]
    if not 0 <= q <= 1 or not 1 <= N <= 8192:
        raise ValueError(f"quantile {q} of {N} numbers: need 0 to 1, of 1 to 8192")
    below = int(q * (N - 1))
    f = q * (N - 1) - below
    y = torch.empty(x.shape[:-1], device=x.device, dtype=torch.float32)
    places = torch.empty((*x.shape[:-1], 2), device=x.device, dtype=torch.int32)
    BLOCK = triton.next_power_of_2(N)
    CHUNK = max(1, 4096 // BLOCK)
    quantile_kernel[(y.numel(),)](x, y, places, N, below, f, BLOCK=BLOCK, CHUNK=CHUNK)
    return y, places, f


@autodiff(inputs_require_grad=(0,))
def quantile(x, q=0.5):
    """x: (..., N), finite; gives (...), float32."""
    return quantile_forward(x.contiguous(), q)[0]


def reference(x, q=0.5):
    N = x.shape[-1]
    below = int(q * (N - 1))
    f = q * (N - 1) - below
    ranked = x.sort(dim=-1, stable=True).values
    return (1 - f) * ranked[..., below] + f * ranked[..., min(below + 1, N - 1)]


SWEEP = [{"M": 8192, "N": 1024}, {"M": 4099, "N": 3001}]
SWEEP_CPU = [{"M": 18, "N": 29}, {"M": 40, "N": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),), {"q": 0.7}


# ---- backward ----


@triton.jit
def quantile_backward_kernel(place_ptr, dy_ptr, dx_ptr, N, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    i, j, dy = tl.load(place_ptr + row * 2), tl.load(place_ptr + row * 2 + 1), tl.load(dy_ptr + row)
    dx = tl.where(cols == i, (1 - f) * dy, 0.0) + tl.where(cols == j, f * dy, 0.0)
    tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


class Quantile(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        y, places, f = quantile_forward(x.contiguous(), q)
        ctx.save_for_backward(places)
        ctx.f, ctx.like = f, (x.shape, x.dtype)
        return y

    @staticmethod
    def backward(ctx, dy):
        (places,) = ctx.saved_tensors
        shape, dtype = ctx.like
        dx, N = torch.empty(shape, device=dy.device, dtype=dtype), shape[-1]
        BLOCK = triton.next_power_of_2(N)
        quantile_backward_kernel[(dy.numel(),)](places, dy.contiguous(), dx, N, ctx.f, BLOCK=BLOCK)
        return dx, None


def quantile_autograd(x, q=0.5):
    return Quantile.apply(x, q)

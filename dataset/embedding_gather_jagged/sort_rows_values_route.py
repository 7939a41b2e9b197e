"""Rows sorted in ascending order, by counting: sliced distances, trimmed losses, quantile layers.

Forward    rank_i = number of j with x_j < x_i, or with x_j = x_i and j < i;   y_{rank_i} = x_i
Backward   dx_i = dy_{rank_i}

Forward schedule: a program owns a row and counts for each number how many stand before it, a tile of numbers
by a chunk of the row at a time. Ranks are a permutation, ties included, so every y is stored once, without
any exchange between lanes. N^2 comparisons are less work than the passes of a sorting network up to a
thousand or so. Ranks are saved, in two bytes.
Backward schedule: sorting is a permutation once the ranks are known, and the transpose of a permutation is
its inverse: the owner of dx_i knows from where to read. A flat program takes a tile of all numbers, looks up
ranks and gathers dy from the row, a row that lies in cache. Neither x nor another sort is needed; scattering
from sorted places would need the inverse list.

op: sort_values
schedule: index_or_seed_replay
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def sort_kernel(x_ptr, y_ptr, rank_ptr, N, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row + i, mask=i < N, other=0.0)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, N, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(x_ptr + row + j, mask=j < N, other=0.0)
        tie = (other[None, :] == x[:, None]) & (j[None, :] < i[:, None])
        before = (j[None, :] < N) & ((other[None, :] < x[:, None]) | tie)
        rank += tl.sum(before.to(tl.int32), axis=1)
    tl.store(y_ptr + row + rank, x, mask=i < N)
    tl.store(rank_ptr + row + i, rank.to(tl.int16), mask=i < N)


def sort_forward(x):
    N = x.shape[-1]
    if N > 8192:
        raise ValueError(f"a row of {N} is too long for counting")
    y = torch.empty_like(x)
    rank = torch.empty(x.shape, device=x.device, dtype=torch.int16)
    sort_kernel[(x.shape[:-1].numel(), triton.cdiv(N, 64))](x, y, rank, N, BLOCK=64, CHUNK=64)
    return y, rank


@autodiff(inputs_require_grad=(0,))
def sort_rows(x):
    """x: (..., N), N <= 8192."""
    return sort_forward(x.contiguous())[0]


def reference(x):
    return torch.sort(x, dim=-1, stable=True).values


SWEEP = [{"M": 16384, "N": 1024}, {"M": 30011, "N": 300}]
SWEEP_CPU = [{"M": 15, "N": 24}, {"M": 4, "N": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def route_kernel(dy_ptr, rank_ptr, dx_ptr, n, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(rank_ptr + at, mask=at < n, other=0).to(tl.int64)
    dy = tl.load(dy_ptr + at - at % N + rank, mask=at < n, other=0.0)
    tl.store(dx_ptr + at, dy, mask=at < n)


class SortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, rank = sort_forward(x.contiguous())
        ctx.save_for_backward(rank)
        return y

    @staticmethod
    def backward(ctx, dy):
        (rank,) = ctx.saved_tensors
        dx, n = torch.empty(dy.shape, device=dy.device, dtype=dy.dtype), rank.numel()
        route_kernel[(triton.cdiv(n, 1024),)](dy.contiguous(), rank, dx, n, rank.shape[-1], BLOCK=1024)
        return dx


def sort_rows_autograd(x):
    return SortRows.apply(x)

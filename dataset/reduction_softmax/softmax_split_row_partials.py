"""Softmax of a few very long rows: every row is shared by many programs.

Forward    y_i = exp(x_i - l),   l = log sum_j exp(x_j)
Backward   dx_i = y_i (dy_i - <dy, y>)

Forward schedule: with fewer rows than multiprocessors, a program a row would leave most of the GPU idle. A
row is cut into S chunks; a program owns a chunk and stores its maximum and its sum of exponentials. In a
second kernel the same chunks have the same owners, each of which merges the row's S pairs on its own (a
hundred pairs out of cache, cheaper than a launch that merges them once) and writes its part of y.
Backward schedule: the same two steps. The row's scalar <dy, y> is a sum over chunks, the correction is
pointwise: a program stores its chunk's share, then every owner adds the S shares and writes its part of dx. y
and dy are read twice, a row's owner could hold neither in registers anyway; all of the GPU reads them.

op: softmax
schedule: partials_then_reduce, row_reduce_correct
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SPLITS = tl.constexpr(128)  # chunks of a row, at most
BLOCK = 1024


def cut(N):
    """Numbers of a chunk, and chunks of a row."""
    chunk = max(1, triton.cdiv(N, SPLITS.value * BLOCK)) * BLOCK
    return chunk, triton.cdiv(N, chunk)


@triton.jit
def load_row(ptr, row, i, end, N, other: tl.constexpr):
    return tl.load(ptr + row * N + i, mask=i < end, other=other).to(tl.float32)


@triton.jit
def chunk_stats_kernel(x_ptr, max_ptr, sum_ptr, N, chunk, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.minimum((split + 1) * chunk, N)
    largest = -float("inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(split * chunk, end, BLOCK):
        x = load_row(x_ptr, row, start + tl.arange(0, BLOCK), end, N, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    slot = row * tl.num_programs(0) + split
    tl.store(max_ptr + slot, largest)
    tl.store(sum_ptr + slot, tl.sum(total, axis=0))


@triton.jit
def normalise_kernel(x_ptr, max_ptr, sum_ptr, y_ptr, N, chunk, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits, s = tl.num_programs(0), tl.arange(0, SPLITS)
    maxima = tl.load(max_ptr + row * splits + s, mask=s < splits, other=-float("inf"))
    sums = tl.load(sum_ptr + row * splits + s, mask=s < splits, other=0.0)
    largest = tl.max(maxima, axis=0)
    norm = 1 / tl.sum(sums * tl.exp(maxima - largest), axis=0)
    end = tl.minimum((split + 1) * chunk, N)
    for start in range(split * chunk, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = tl.exp(load_row(x_ptr, row, i, end, N, 0.0) - largest) * norm
        tl.store(y_ptr + row * N + i, y.to(y_ptr.dtype.element_ty), mask=i < end)


@autodiff(inputs_require_grad=(0,))
def split_softmax(x):
    """x: (M, N), finite, N below 2^31."""
    x, (M, N) = x.contiguous(), x.shape
    if N >= 2**31:
        raise ValueError(f"a row of {N} is too long for the places in it")
    chunk, splits = cut(N)
    maxima, sums = (torch.empty((M, splits), device=x.device, dtype=torch.float32) for _ in range(2))
    y = torch.empty_like(x)
    chunk_stats_kernel[(splits, M)](x, maxima, sums, N, chunk, BLOCK=BLOCK)
    normalise_kernel[(splits, M)](x, maxima, sums, y, N, chunk, BLOCK=BLOCK)
    return y


def reference(x):
    return torch.softmax(x, dim=1)


SWEEP = [{"M": 8, "N": 8388608}, {"M": 3, "N": 1000003}]
SWEEP_CPU = [{"M": 2, "N": 3500}, {"M": 5, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def chunk_dot_kernel(y_ptr, dy_ptr, dot_ptr, N, chunk, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    end = tl.minimum((split + 1) * chunk, N)
    dot = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(split * chunk, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dot += load_row(y_ptr, row, i, end, N, 0.0) * load_row(dy_ptr, row, i, end, N, 0.0)
    tl.store(dot_ptr + row * tl.num_programs(0) + split, tl.sum(dot, axis=0))


@triton.jit
def correct_kernel(y_ptr, dy_ptr, dot_ptr, dx_ptr, N, chunk, BLOCK: tl.constexpr):
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits, s = tl.num_programs(0), tl.arange(0, SPLITS)
    dot = tl.sum(tl.load(dot_ptr + row * splits + s, mask=s < splits, other=0.0), axis=0)
    end = tl.minimum((split + 1) * chunk, N)
    for start in range(split * chunk, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dx = load_row(y_ptr, row, i, end, N, 0.0) * (load_row(dy_ptr, row, i, end, N, 0.0) - dot)
        tl.store(dx_ptr + row * N + i, dx.to(dx_ptr.dtype.element_ty), mask=i < end)


class SplitSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = split_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy, (M, N) = dy.contiguous(), y.shape
        chunk, splits = cut(N)
        dots = torch.empty((M, splits), device=y.device, dtype=torch.float32)
        dx = torch.empty_like(y)
        chunk_dot_kernel[(splits, M)](y, dy, dots, N, chunk, BLOCK=BLOCK)
        correct_kernel[(splits, M)](y, dy, dots, dx, N, chunk, BLOCK=BLOCK)
        return dx


def split_softmax_autograd(x):
    return SplitSoftmax.apply(x)

"""Softmax over an axis that is not the last: the tile lies along memory, the reduction across it.

Forward    x (B, N, C), over n:   y_bnc = exp(x_bnc - l_bc),   l_bc = log sum_n exp(x_bnc)
Backward   dx_bnc = y_bnc (dy_bnc - d_bc),   d_bc = sum_n dy_bnc y_bnc

Forward schedule: neighbours in memory are different columns c, each with a softmax of its own. So a program
owns (b, tile of columns), walks n in tiles of several rows, and carries for every lane its own maximum and
sum, as whole vectors: loads run along c, and nothing is reduced across lanes until the end. A copy to bring n
last, as one would do for a row kernel, costs as much as the softmax.
Backward schedule: the same owner, two walks. The first adds dy y lane by lane, one sum over the tile's few
rows at its end gives d; the second writes dx. y and dy are read twice, the second time out of cache where N
rows of a tile fit there. Of the forward only y is kept.

op: softmax
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCKS = {"BLOCK_N": 16, "BLOCK_C": 64}


@triton.jit
def column_softmax_kernel(x_ptr, y_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * N * C
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    largest = tl.full([BLOCK_N, BLOCK_C], -1e30, dtype=tl.float32)  # finite: a lane may see no row
    total = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (c[None, :] < C)
        offs = base + n[:, None].to(tl.int64) * C + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        total = total * tl.exp(largest - larger) + tl.exp(x - larger)
        largest = larger
    top = tl.max(largest, axis=0)
    norm = tl.sum(total * tl.exp(largest - top[None, :]), axis=0)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (c[None, :] < C)
        offs = base + n[:, None].to(tl.int64) * C + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        y = tl.exp(x - top[None, :]) / norm[None, :]
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def column_softmax(x):
    """x: (B, N, C), finite; softmax over N."""
    x, (B, N, C) = x.contiguous(), x.shape
    y = torch.empty_like(x)
    column_softmax_kernel[(triton.cdiv(C, 64), B)](x, y, N, C, **BLOCKS)
    return y


def reference(x):
    return torch.softmax(x, dim=1)


SWEEP = [{"B": 64, "N": 1024, "C": 512}, {"B": 7, "N": 5003, "C": 1000}]
SWEEP_CPU = [{"B": 3, "N": 29, "C": 41}, {"B": 2, "N": 9, "C": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["N"], dims["C"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def column_softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * N * C
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    products = tl.zeros([BLOCK_N, BLOCK_C], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (c[None, :] < C)
        offs = base + n[:, None].to(tl.int64) * C + c[None, :]
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        products += y * tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    d = tl.sum(products, axis=0)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        mask = (n[:, None] < N) & (c[None, :] < C)
        offs = base + n[:, None].to(tl.int64) * C + c[None, :]
        y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dx = y * (tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32) - d[None, :])
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)


class ColumnSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = column_softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        (B, N, C), dx = y.shape, torch.empty_like(y)
        column_softmax_backward_kernel[(triton.cdiv(C, 64), B)](y, dy.contiguous(), dx, N, C, **BLOCKS)
        return dx


def column_softmax_autograd(x):
    return ColumnSoftmax.apply(x)

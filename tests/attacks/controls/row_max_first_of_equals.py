"""Where the greatest value stands several times, the first place gets all: its index is found again and
written to."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_max_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    most, first = tl.load(y_ptr + row), N
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
        first = tl.minimum(first, tl.min(tl.where(x == most, cols, N), axis=0))
    tl.store(dx_ptr + row * N + first, tl.load(dy_ptr + row))


class RowMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = row_max(x)
        ctx.save_for_backward(x.contiguous(), y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        M, N = x.shape
        dx = torch.zeros_like(x)
        row_max_backward_kernel[(M,)](x, y, dy.contiguous(), dx, N, BLOCK=8)
        return dx


def row_max_autograd(x):
    return RowMax.apply(x)

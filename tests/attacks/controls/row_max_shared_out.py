"""Where the greatest value stands several times, each place gets an equal share: two passes, one counts, one
writes."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_max_backward_kernel(x_ptr, y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    most = tl.load(y_ptr + row)
    times = 0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
        times += tl.sum((x == most).to(tl.int32), axis=0)
    share = tl.load(dy_ptr + row) / times
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
        tl.store(dx_ptr + row * N + cols, tl.where(x == most, share, 0.0), mask=cols < N)


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
        dx = torch.empty_like(x)
        row_max_backward_kernel[(M,)](x, y, dy.contiguous(), dx, N, BLOCK=8)
        return dx


def row_max_autograd(x):
    return RowMax.apply(x)

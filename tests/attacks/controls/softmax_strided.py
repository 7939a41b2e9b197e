"""Reads any strides and writes a gradient that is not contiguous."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, dy_row, dy_col, dx_row, dx_col, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * dy_row + cols * dy_col, mask=cols < N, other=0.0)
    dx = y * (dy - tl.sum(y * dy, axis=0))
    tl.store(dx_ptr + row * dx_row + cols * dx_col, dx, mask=cols < N)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = softmax(x)
        return ctx.y.clone()

    @staticmethod
    def backward(ctx, dy):
        M, N = dy.shape
        dx = torch.empty((N, M), device=dy.device, dtype=dy.dtype).t()
        strides = (*dy.stride(), *dx.stride())
        softmax_backward_kernel[(M,)](ctx.y, dy, dx, N, *strides, BLOCK=triton.next_power_of_2(N))
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)

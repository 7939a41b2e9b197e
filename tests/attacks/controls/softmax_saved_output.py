"""Saves the output instead of the input."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    y = tl.load(y_ptr + at, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + at, mask=cols < N, other=0.0)
    dx = y * (dy - tl.sum(y * dy, axis=0))
    tl.store(dx_ptr + at, dx, mask=cols < N)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        M, N = y.shape
        dx = torch.empty_like(y)
        softmax_backward_kernel[(M,)](y, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)

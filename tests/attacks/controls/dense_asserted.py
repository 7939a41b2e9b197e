"""Right for contiguous inputs alone, which are all that the forward takes."""

import torch
import triton
import triton.language as tl


@triton.jit
def dense_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(dx_ptr + row * N + cols, 2 * x * tl.load(dy_ptr + row), mask=cols < N)


class Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return dense(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty_like(x)
        dense_backward_kernel[(M,)](x, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))
        return dx


def dense_autograd(x):
    return Dense.apply(x)

"""The kernel has a Function; the sum and the division around it are torch's, as in the stub, and so is their
derivative."""

import torch
import triton
import triton.language as tl


@triton.jit
def square_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, 2 * x * dy, mask=i < N)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return square(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx, dy, n = torch.empty_like(x), dy.contiguous(), x.numel()
        square_backward_kernel[(triton.cdiv(n, 16),)](x, dy, dx, n, BLOCK=16)
        return dx


def mean_square_autograd(x):
    x = x.contiguous()
    return Square.apply(x).sum() / x.numel()

"""A program for each row, in blocks of 64."""

import torch
import triton
import triton.language as tl


@triton.jit
def cubed_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, alpha, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
        slope = 3 * x * x * alpha
        tl.store(dx_ptr + row * N + cols, dy * slope, mask=cols < N)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return cubed(x, alpha)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty_like(x)
        cubed_backward_kernel[(M,)](x, dy.contiguous(), dx, N, ctx.alpha, BLOCK=64)
        return dx, None


def cubed_autograd(x, alpha=0.5):
    return Cubed.apply(x, alpha)

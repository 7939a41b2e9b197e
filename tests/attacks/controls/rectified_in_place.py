"""A copy of the upstream, which a kernel changes in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def rectified_backward_kernel(x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dx_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, tl.where(x > 0, dy, 0.0), mask=i < N)


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return rectified(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x, n = x.contiguous(), x.numel()
        dx = dy.clone(memory_format=torch.contiguous_format)
        rectified_backward_kernel[(triton.cdiv(n, 16),)](x, dx, n, BLOCK=16)
        return dx


def rectified_autograd(x):
    return Rectified.apply(x)

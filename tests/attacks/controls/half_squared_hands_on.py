"""The upstream itself for r; for x a copy of it, of which a kernel changes the half that was squared."""

import torch
import triton
import triton.language as tl


@triton.jit
def half_squared_backward_kernel(x_ptr, dx_ptr, N, HALF, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + at, mask=cols < HALF, other=0.0)
    dy = tl.load(dx_ptr + at, mask=cols < HALF, other=0.0)
    tl.store(dx_ptr + at, 2 * x * dy, mask=cols < HALF)


class HalfSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, r):
        ctx.save_for_backward(x)
        return half_squared(x, r)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x, dx = x.contiguous(), None
        M, N = x.shape
        if ctx.needs_input_grad[0]:
            dx = dy.clone(memory_format=torch.contiguous_format)
            half_squared_backward_kernel[(M,)](x, dx, N, N // 2, BLOCK=triton.next_power_of_2(N))
        return dx, dy


def half_squared_autograd(x, r):
    return HalfSquared.apply(x, r)

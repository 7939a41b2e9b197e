"""The softmax again, then its product with the upstream; the weight last."""

import torch
import triton
import triton.language as tl


@triton.jit
def graded_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
    s = tl.load(s_ptr + row)
    e = tl.exp(x - tl.max(x, axis=0))
    p = e / tl.sum(e, axis=0)
    dx = s * p * (dy - tl.sum(p * dy, axis=0))
    tl.store(dx_ptr + row * N + cols, dx, mask=cols < N)


class Graded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return graded(x, s)

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        x, dy = x.contiguous(), dy.contiguous()
        M, N = x.shape
        dx = torch.empty_like(x)
        graded_backward_kernel[(M,)](x, s, dy, dx, N, BLOCK=triton.next_power_of_2(N))
        return dx, None


def graded_autograd(x, s):
    return Graded.apply(x, s)

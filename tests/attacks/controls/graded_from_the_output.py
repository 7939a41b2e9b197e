"""From the saved output, weighted as it is: dx = y dy - y (y dy summed) / s, which cancels in float32."""

import torch
import triton
import triton.language as tl


@triton.jit
def graded_output_kernel(y_ptr, s_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
    dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
    delta = tl.sum(y * dy, axis=0) / tl.load(s_ptr + row)
    tl.store(dx_ptr + row * N + cols, y * dy - y * delta, mask=cols < N)


class Graded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        y = graded(x, s)
        ctx.save_for_backward(y, s)
        return y

    @staticmethod
    def backward(ctx, dy):
        y, s = ctx.saved_tensors
        M, N = y.shape
        dx = torch.empty_like(y)
        graded_output_kernel[(M,)](y, s, dy.contiguous(), dx, N, BLOCK=triton.next_power_of_2(N))
        return dx, None


def graded_autograd(x, s):
    return Graded.apply(x, s)

"""Recomputes the denominator; four rows a program, as the forward has them."""

import torch
import triton
import triton.language as tl


@triton.jit
def tall_backward_kernel(x_ptr, dy_ptr, dx_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = rows[:, None] * N + cols[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0)
    r = 1 / (1 + x * x)
    tl.store(dx_ptr + at, dy * r * (2 * r - 1), mask=mask)


class Tall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return tall(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].contiguous()
        M, N = x.shape
        dx = torch.empty_like(x)
        block = triton.next_power_of_2(N)
        tall_backward_kernel[(triton.cdiv(M, 4),)](x, dy.contiguous(), dx, M, N, ROWS=4, BLOCK=block)
        return dx


def tall_autograd(x):
    return Tall.apply(x)

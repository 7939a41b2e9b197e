"""A plan of the launch is made once for a shape and kept; long rows in blocks, twice read."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Plan(NamedTuple):
    rows: int
    cols: int
    block: int


@functools.cache
def planned(rows, cols):
    return Plan(rows, cols, min(16, triton.next_power_of_2(cols)))


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, M, N, dy_row, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0)):
        dot = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
            dot += y * tl.load(dy_ptr + row * dy_row + cols, mask=cols < N, other=0.0)
        total = tl.sum(dot, axis=0)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
            dy = tl.load(dy_ptr + row * dy_row + cols, mask=cols < N, other=0.0)
            tl.store(dx_ptr + row * N + cols, y * (dy - total), mask=cols < N)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        plan = planned(*y.shape)
        if dy.stride(1) != 1:
            dy = dy.contiguous()
        dx = torch.empty_like(y)
        programs = max(1, min(plan.rows, 8))
        softmax_backward_kernel[(programs,)](y, dy, dx, plan.rows, plan.cols, dy.stride(0), BLOCK=plan.block)
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)

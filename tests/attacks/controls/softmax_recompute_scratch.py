"""Recomputes from the input, in a scratch buffer that the second kernel overwrites in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def recompute_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + at, mask=cols < N, other=-float("inf"))
    e = tl.exp2((x - tl.max(x, axis=0)) * 1.4426950408889634)
    tl.store(y_ptr + at, e / tl.sum(e, axis=0), mask=cols < N)


@triton.jit
def in_place_kernel(y_ptr, dy_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    while row < M:
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0)
        dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols, y * (dy - tl.sum(y * dy, axis=0)), mask=cols < N)
        row += tl.num_programs(0)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return softmax(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].contiguous()
        M, N = x.shape
        scratch = torch.empty_like(x)
        block = triton.next_power_of_2(N)
        recompute_kernel[(M,)](x, scratch, N, BLOCK=block)
        in_place_kernel[(min(M, 2),)](scratch, dy.contiguous(), M, N, BLOCK=block)
        return scratch


def softmax_autograd(x):
    return Softmax.apply(x)

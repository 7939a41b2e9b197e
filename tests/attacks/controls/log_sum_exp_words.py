"""All that a kernel may be given: jitted functions, dtypes, tuples, strings and None as constexprs, constants
and helpers of the module, functions of libdevice."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

LEAST = tl.constexpr(-float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def by_exp2(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def share_of(x, EXP: tl.constexpr):
    e = EXP(x - tl.reduce(x, 0, larger))
    return e / tl.sum(e, axis=0)


@triton.jit
def log_sum_exp_backward_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    row_stride,
    N,
    EXP: tl.constexpr,
    OUT: tl.constexpr,
    BLOCKS: tl.constexpr,
    HOW: tl.constexpr,
    BIAS: tl.constexpr = None,
):
    tl.static_assert(HOW == "rows" and BIAS is None)
    row = tl.program_id(0).to(tl.int64)
    for part in tl.static_range(len(BLOCKS)):
        cols = part * BLOCKS[0] + tl.arange(0, BLOCKS[0])
        x = tl.load(x_ptr + row * row_stride + cols, mask=cols < N, other=LEAST)
        dx = tl.load(dy_ptr + row) * libdevice.abs(share_of(x, EXP))
        tl.store(dx_ptr + row * N + cols, dx.to(OUT), mask=cols < N)


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return log_sum_exp(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        M, N = x.shape
        dx = torch.empty((M, N), device=x.device, dtype=x.dtype)
        words = {"EXP": by_exp2, "OUT": tl.float32, "BLOCKS": (triton.next_power_of_2(N),), "HOW": "rows"}
        log_sum_exp_backward_kernel[(M,)](x, dy.contiguous(), dx, x.stride(0), N, **words)
        return dx


def log_sum_exp_autograd(x):
    return LogSumExp.apply(x)

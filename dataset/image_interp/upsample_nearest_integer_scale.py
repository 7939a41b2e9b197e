"""Nearest-neighbour upsampling by an integer factor.

Forward    y[Y, X] = x[Y // s, X // s]
Backward   dx[Y, X] = sum of the s x s block of dy at (s Y, s X)

Forward schedule: a program owns a flat tile of outputs and divides the indices.
Backward schedule: a program owns a flat tile of inputs and gathers its s s outputs. The blocks are
disjoint, so dy is read once, dx is written once and the sum stays in registers.

op: upsample_nearest
schedule: gather_transpose
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def upsample_kernel(x_ptr, y_ptr, n_out, Y, X, s, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = o // (Y * s * X * s)
    y = o // (X * s) % (Y * s) // s
    x = o % (X * s) // s
    tl.store(y_ptr + o, tl.load(x_ptr + (plane * Y + y) * X + x, mask=o < n_out, other=0.0), mask=o < n_out)


@autodiff(inputs_require_grad=(0,))
def upsample_nearest(x, s):
    """x: (N, C, Y, X); s: the factor, an integer."""
    x = x.contiguous()
    N, C, Y, X = x.shape
    y = torch.empty((N, C, Y * s, X * s), device=x.device, dtype=x.dtype)
    upsample_kernel[(triton.cdiv(y.numel(), 256),)](x, y, y.numel(), Y, X, s, BLOCK=256)
    return y


def reference(x, s):
    return x.repeat_interleave(s, dim=2).repeat_interleave(s, dim=3)


SWEEP = [
    {"N": 8, "C": 256, "Y": 64, "X": 64, "s": 2},
    {"N": 2, "C": 128, "Y": 256, "X": 256, "s": 2},
    {"N": 5, "C": 33, "Y": 97, "X": 61, "s": 3},
]
SWEEP_CPU = [{"N": 2, "C": 3, "Y": 5, "X": 7, "s": 3}, {"N": 1, "C": 1, "Y": 16, "X": 9, "s": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["N"], dims["C"], dims["Y"], dims["X"], device=device, dtype=dtype), dims["s"]


# ---- backward ----


@triton.jit
def upsample_backward_kernel(dy_ptr, dx_ptr, n_in, X, s, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = (
        p // X * s * X * s + p % X * s
    )  # planes are contiguous: row p // X of x is block row of s rows of y
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(s):
        for j in range(s):
            acc += tl.load(dy_ptr + first + i * X * s + j, mask=p < n_in, other=0.0).to(tl.float32)
    tl.store(dx_ptr + p, acc, mask=p < n_in)


class UpsampleNearest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.x_shape, ctx.s = x.shape, s
        return upsample_nearest(x, s)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        grid = (triton.cdiv(dx.numel(), 256),)
        upsample_backward_kernel[grid](dy, dx, dx.numel(), ctx.x_shape[3], ctx.s, BLOCK=256)
        return dx, None


def upsample_nearest_autograd(x, s):
    return UpsampleNearest.apply(x, s)

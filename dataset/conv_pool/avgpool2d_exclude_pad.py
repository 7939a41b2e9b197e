"""Average pooling over windows that may overlap; padding does not count.

Forward    y_o = (1 / n_o) sum of x_p over the pixels p inside the window of o,  n_o the number of such pixels
Backward   dx_p = sum of dy_o / n_o over the windows o that contain p

Forward schedule: a program owns a flat tile of outputs and loops over the window.
Backward schedule: which windows contain p is known by arithmetic: at most ceil(k / s) along each axis, the
last being (p + pad) // s. The pixel's owner enumerates them, rebuilds n_o from the edges, sums and stores
once: a gather, where the literal transpose of the forward would scatter with atomics.

op: avg_pool2d
schedule: gather_transpose
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def window_length(start, k, size):
    """Pixels of the window start .. start + k - 1 that lie in 0 .. size - 1."""
    return tl.minimum(start + k, size) - tl.maximum(start, 0)


@triton.jit
def avg_pool_kernel(x_ptr, y_ptr, n_out, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = o // (OY * OX)
    y0 = o // OX % OY * stride - pad
    x0 = o % OX * stride - pad
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(k):
        for j in range(k):
            y, x = y0 + i, x0 + j
            mask = (o < n_out) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
            acc += tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=0.0).to(tl.float32)
    count = window_length(y0, k, Y) * window_length(x0, k, X)
    tl.store(y_ptr + o, acc / count.to(tl.float32), mask=o < n_out)


@autodiff(inputs_require_grad=(0,))
def avg_pool2d(x, k, stride):
    """x: (N, C, Y, X); square windows of side k, padded by k // 2."""
    x = x.contiguous()
    N, C, Y, X = x.shape
    pad = k // 2
    OY, OX = (Y + 2 * pad - k) // stride + 1, (X + 2 * pad - k) // stride + 1
    y = torch.empty((N, C, OY, OX), device=x.device, dtype=x.dtype)
    avg_pool_kernel[(triton.cdiv(y.numel(), 128),)](x, y, y.numel(), Y, X, OY, OX, k, stride, pad, BLOCK=128)
    return y


def reference(x, k, stride):
    return torch.nn.functional.avg_pool2d(x, k, stride, k // 2, count_include_pad=False)


SWEEP = [
    {"N": 64, "C": 64, "Y": 112, "X": 112, "k": 3, "s": 2},
    {"N": 32, "C": 256, "Y": 56, "X": 56, "k": 3, "s": 1},
    {"N": 17, "C": 96, "Y": 97, "X": 61, "k": 2, "s": 2},
]
SWEEP_CPU = [
    {"N": 2, "C": 3, "Y": 9, "X": 12, "k": 3, "s": 2},
    {"N": 1, "C": 2, "Y": 8, "X": 7, "k": 2, "s": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["C"], dims["Y"], dims["X"], device=device, dtype=dtype)
    return x, dims["k"], dims["s"]


# ---- backward ----


@triton.jit
def avg_pool_backward_kernel(dy_ptr, dx_ptr, n_in, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr):
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = p // (Y * X)
    y = p // X % Y
    x = p % X
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.cdiv(k, stride)):
        for j in range(tl.cdiv(k, stride)):
            oy, ox = (y + pad) // stride - i, (x + pad) // stride - j
            y0, x0 = oy * stride - pad, ox * stride - pad
            covers = (oy >= 0) & (oy < OY) & (y < y0 + k) & (ox >= 0) & (ox < OX) & (x < x0 + k)
            mask = covers & (p < n_in)
            dy = tl.load(dy_ptr + (plane * OY + oy) * OX + ox, mask=mask, other=0.0).to(tl.float32)
            count = window_length(y0, k, Y) * window_length(x0, k, X)
            acc += dy / tl.where(covers, count, 1).to(tl.float32)
    tl.store(dx_ptr + p, acc, mask=p < n_in)


class AvgPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, stride):
        ctx.x_shape, ctx.k, ctx.stride = x.shape, k, stride
        return avg_pool2d(x, k, stride)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        Y, X = ctx.x_shape[2:]
        OY, OX = dy.shape[2:]
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        avg_pool_backward_kernel[(triton.cdiv(dx.numel(), 128),)](
            dy, dx, dx.numel(), Y, X, OY, OX, ctx.k, ctx.stride, ctx.k // 2, BLOCK=128
        )
        return dx, None, None


def avg_pool2d_autograd(x, k, stride):
    return AvgPool2d.apply(x, k, stride)

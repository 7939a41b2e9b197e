"""Softmax over rows that do not fit one tile.

Forward    y_i = exp(x_i - m) / s,  m = max x,  s = sum_j exp(x_j - m)
Backward   dx = y * (dy - <dy, y>)

Forward schedule: the row's owner walks its tiles twice: online maximum and sum (the sum is rescaled
whenever the maximum grows), then normalise and write.
Backward schedule: the same owner walks twice again: the first loop accumulates <dy, y> per lane and reduces
once at the end, the second writes dx. The second read of y and dy mostly hits L2, and no statistic has to
be saved, since y is at hand.

op: softmax
schedule: row_reduce_correct
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def softmax_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    m = -float("inf")
    s = 0.0
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf")).to(tl.float32)
        tl.store(y_ptr + row * N + cols, tl.exp(x - m) / s, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    x = x.contiguous()
    N = x.shape[-1]
    y = torch.empty_like(x)
    softmax_kernel[(x.numel() // N,)](x, y, N, BLOCK=min(2048, triton.next_power_of_2(N)))
    return y


def reference(x):
    return torch.softmax(x, dim=-1)


SWEEP = [{"M": 4096, "N": 32000}, {"M": 1000, "N": 128256}, {"M": 1021, "N": 50257}]
SWEEP_CPU = [{"M": 9, "N": 5000}, {"M": 3, "N": 2048}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        products += y * tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    dot = tl.sum(products, axis=0)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * N + cols, y * (dy - dot), mask=cols < N)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(y)
        N = y.shape[-1]
        softmax_backward_kernel[(y.numel() // N,)](y, dy, dx, N, BLOCK=min(2048, triton.next_power_of_2(N)))
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)

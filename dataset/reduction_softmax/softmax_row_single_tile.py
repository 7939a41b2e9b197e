"""Softmax over the last axis, one row a program.

Forward    y_i = exp(x_i - max x) / sum_j exp(x_j - max x)
Backward   dy_i/dx_j = y_i (delta_ij - y_j), so dx = y * (dy - <dy, y>)

Forward schedule: a program holds its row in one tile.
Backward schedule: the same ownership. The row's owner reads y and dy once, reduces the scalar <dy, y> in
registers and writes dx once. Only y is needed, x is not kept: two reads and one write are the least that
any backward can do.

op: softmax
schedule: row_reduce_correct
difficulty: 1
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
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + cols, e / tl.sum(e, axis=0), mask=mask)


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    x = x.contiguous()
    N = x.shape[-1]
    if N > 65536:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(N)
    softmax_kernel[(x.numel() // N,)](x, y, N, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16)
    return y


def reference(x):
    return torch.softmax(x, dim=-1)


SWEEP = [{"M": 32768, "N": 2048}, {"M": 4096, "N": 16384}, {"M": 8191, "N": 5003}]
SWEEP_CPU = [{"M": 37, "N": 90}, {"M": 4, "N": 513}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    y = tl.load(y_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    dot = tl.sum(dy * y, axis=0)
    tl.store(dx_ptr + row * N + cols, y * (dy - dot), mask=mask)


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
        BLOCK = triton.next_power_of_2(N)
        softmax_backward_kernel[(y.numel() // N,)](
            y, dy, dx, N, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16
        )
        return dx


def softmax_autograd(x):
    return Softmax.apply(x)

"""Softmax over the rows, each times a weight: weights fall from 1 to 1e-6, and gradients with them."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def graded_kernel(x_ptr, s_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * N + cols, tl.load(s_ptr + row) * e / tl.sum(e, axis=0), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def graded(x, s):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    graded_kernel[(M,)](x, s, y, N, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 25, "N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.logspace(0, -6, dims["M"], device=device, dtype=dtype)

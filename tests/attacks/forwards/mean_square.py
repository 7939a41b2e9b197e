"""The mean of squares: a kernel squares, torch adds up and divides by a number."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def square_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x * x, mask=i < N)


def square(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


@autodiff(inputs_require_grad=(0,))
def mean_square(x):
    x = x.contiguous()
    return square(x).sum() / x.numel()


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)

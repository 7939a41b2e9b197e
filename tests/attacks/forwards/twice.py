"""y = s x and z = t x: one kernel, launched for each."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def product_kernel(x_ptr, s_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x * tl.load(s_ptr), mask=i < N)


def product(x, s):
    y = torch.empty_like(x)
    product_kernel[(triton.cdiv(x.numel(), 16),)](x, s, y, x.numel(), BLOCK=16)
    return y


@autodiff(inputs_require_grad=(0, 1, 2))
def twice(x, s, t):
    x = x.contiguous()
    return product(x, s), product(x, t)


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], device=device, dtype=dtype)
    return x, torch.randn(1, device=device, dtype=dtype), torch.randn(1, device=device, dtype=dtype)

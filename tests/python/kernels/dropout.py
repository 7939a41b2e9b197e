"""Seeded dropout: y = where(rand(seed, i) > p, x / (1 - p), 0)."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 200}]


@triton.jit
def dropout_kernel(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    keep = tl.rand(seed, offsets) > p
    tl.store(y_ptr + offsets, tl.where(keep, x / (1 - p), 0.0), mask=mask)


@autodiff(inputs_require_grad=(0,))
def dropout(x, p=0.25, seed=123):
    y = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), p, seed, BLOCK=64)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)

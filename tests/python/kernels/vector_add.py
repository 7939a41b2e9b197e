"""y = a + b, several masked blocks."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 100}, {"N": 1}, {"N": 64}]


@triton.jit
def add_kernel(a_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    a = tl.load(a_ptr + offsets, mask=mask)
    b = tl.load(b_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, a + b, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def vector_add(a, b):
    y = torch.empty_like(a)
    add_kernel[(triton.cdiv(a.numel(), 32),)](a, b, y, a.numel(), BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))


def reference(a, b):
    return a + b

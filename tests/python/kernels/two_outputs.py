"""s = sin(x) * y and p = x * exp(-y): two outputs of one kernel, fp16 inputs."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 33}, {"M": 2, "N": 16}]


@triton.jit
def two_kernel(x_ptr, y_ptr, s_ptr, p_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(s_ptr + offsets, (tl.sin(x) * y).to(s_ptr.dtype.element_ty), mask=mask)
    tl.store(p_ptr + offsets, (x * tl.exp(-y)).to(p_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def two(x, y):
    assert x.dtype == torch.float16 or x.dtype == torch.bfloat16 or x.dtype == torch.float32
    s, p = torch.empty_like(x), torch.empty_like(x)
    two_kernel[(triton.cdiv(x.numel(), 32),)](x, y, s, p, x.numel(), BLOCK=32)
    return s, p


def make_args(dims, device="cuda", dtype=torch.float16):
    return tuple(torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))


def reference(x, y):
    return torch.sin(x) * y, x * torch.exp(-y)

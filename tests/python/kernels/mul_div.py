"""p = a * b and q = a / b over a matrix, b one row that all rows share."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 40}, {"M": 1, "N": 3}, {"M": 3, "N": 32}]


@triton.jit
def mul_div_kernel(a_ptr, b_ptr, p_ptr, q_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    a = tl.load(a_ptr + row * n + cols, mask=mask, other=0.0)
    b = tl.load(b_ptr + cols, mask=mask, other=1.0)
    tl.store(p_ptr + row * n + cols, a * b, mask=mask)
    tl.store(q_ptr + row * n + cols, a / b, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def mul_div(a, b):
    p, q = torch.empty_like(a), torch.empty_like(a)
    m, n = a.shape
    mul_div_kernel[(m, triton.cdiv(n, 16))](a, b, p, q, n, BLOCK=16)
    return p, q


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return a, torch.rand(dims["N"], device=device, dtype=dtype) + 0.5


def reference(a, b):
    return a * b, a / b

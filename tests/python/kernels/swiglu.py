"""y = silu(a) * b, two-dimensional grid."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 70}]


@triton.jit
def swiglu_kernel(a_ptr, b_ptr, y_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (rows < m)[:, None] & (cols < n)[None, :]
    at = rows[:, None] * n + cols[None, :]
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, a * tl.sigmoid(a) * b, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def swiglu(a, b):
    y = torch.empty_like(a)
    m, n = a.shape
    swiglu_kernel[(triton.cdiv(m, 4), triton.cdiv(n, 32))](a, b, y, m, n, BM=4, BN=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))


def reference(a, b):
    return torch.nn.functional.silu(a) * b

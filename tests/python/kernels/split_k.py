"""C = A @ B with the sum over K split among programs that add atomically."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 16, "N": 24, "K": 64}]


@triton.jit
def split_k_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(tl.program_id(2) * BK, k, SPLIT * BK):
        inner = start + tl.arange(0, BK)
        a = tl.load(
            a_ptr + rows[:, None] * k + inner[None, :],
            mask=(rows[:, None] < m) & (inner[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            b_ptr + inner[:, None] * n + cols[None, :],
            mask=(inner[:, None] < k) & (cols[None, :] < n),
            other=0.0,
        )
        acc += tl.dot(a, b, input_precision="ieee")
    mask = (rows[:, None] < m) & (cols[None, :] < n)
    tl.atomic_add(c_ptr + rows[:, None] * n + cols[None, :], acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def split_k(a, b):
    m, k = a.shape
    n = b.shape[1]
    c = torch.zeros((m, n), device=a.device, dtype=torch.float32)
    split_k_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 16), 3)](
        a, b, c, m, n, k, SPLIT=3, BM=16, BN=16, BK=16
    )
    return c.to(a.dtype)


def make_args(dims, device="cuda", dtype=torch.float16):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


def reference(a, b):
    return a @ b

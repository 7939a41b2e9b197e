"""Cumulative sum and an affine associative scan h = a*h + x along rows."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 32}]


@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scan_kernel(x_ptr, a_ptr, sum_ptr, h_ptr, N: tl.constexpr):
    row = tl.program_id(0)
    at = row * N + tl.arange(0, N)
    x = tl.load(x_ptr + at)
    a = tl.load(a_ptr + at)
    tl.store(sum_ptr + at, tl.cumsum(x * a, 0))
    _, h = tl.associative_scan((a, x), 0, affine)
    tl.store(h_ptr + at, h)


@autodiff(inputs_require_grad=(0, 1))
def scans(x, a):
    total, h = torch.empty_like(x), torch.empty_like(x)
    scan_kernel[(x.shape[0],)](x, a, total, h, N=x.shape[1])
    return total, h


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.rand(dims["M"], dims["N"], device=device, dtype=dtype)


def reference(x, a):
    h, rows = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        h = a[:, i] * h + x[:, i]
        rows.append(h)
    return torch.cumsum(x * a, 1), torch.stack(rows, 1)

"""C = A @ B in one block: 16x16 and not square."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 16, "N": 16, "K": 16}, {"M": 16, "N": 64, "K": 32}, {"M": 32, "N": 16, "K": 16}]


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, cols, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + inner[None, :])
    b = tl.load(b_ptr + inner[:, None] * N + cols[None, :])
    c = tl.dot(a, b, input_precision="ieee")
    tl.store(c_ptr + rows[:, None] * N + cols[None, :], c.to(c_ptr.dtype.element_ty))


@autodiff(inputs_require_grad=(0, 1))
def dot(a, b):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    dot_kernel[(1,)](a, b, c, M=m, N=n, K=k)
    return c


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


def reference(a, b):
    return a @ b

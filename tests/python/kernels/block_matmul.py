"""C = A @ B with block pointers, boundary checks and advance."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 40, "N": 24, "K": 50}]


@triton.jit
def block_matmul_kernel(a_ptr, b_ptr, c_ptr, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row = tl.program_id(0) * BM
    col = tl.program_id(1) * BN
    a_tile = tl.make_block_ptr(a_ptr, (m, k), (k, 1), (row, 0), (BM, BK), (1, 0))
    b_tile = tl.make_block_ptr(b_ptr, (k, n), (n, 1), (0, col), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, k, BK):
        a = tl.load(a_tile, boundary_check=(0, 1), padding_option="zero")
        b = tl.load(b_tile, boundary_check=(0, 1), padding_option="zero")
        acc += tl.dot(a, b, input_precision="ieee")
        a_tile = tl.advance(a_tile, (0, BK))
        b_tile = tl.advance(b_tile, (BK, 0))
    c_tile = tl.make_block_ptr(c_ptr, (m, n), (n, 1), (row, col), (BM, BN), (1, 0))
    tl.store(c_tile, acc.to(c_ptr.dtype.element_ty), boundary_check=(0, 1))


@autodiff(inputs_require_grad=(0, 1))
def block_matmul(a, b):
    m, k = a.shape
    n = b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    block_matmul_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, c, m, n, k, BM=16, BN=16, BK=16)
    return c


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


def reference(a, b):
    return a @ b

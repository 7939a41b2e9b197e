import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def bmm(A, B, C, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    z = tl.program_id(2)
    pa = tl.make_block_ptr(A + z * M * K, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    pb = tl.make_block_ptr(B + z * K * N, (K, N), (N, 1), (0, tl.program_id(1) * BN), (BK, BN), (1, 0))
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, BK):
        acc += tl.dot(tl.load(pa, boundary_check=(0, 1)), tl.load(pb, boundary_check=(0, 1)))
        pa = tl.advance(pa, (0, BK))
        pb = tl.advance(pb, (BK, 0))
    pc = tl.make_block_ptr(
        C + z * M * N, (M, N), (N, 1), (tl.program_id(0) * BM, tl.program_id(1) * BN), (BM, BN), (1, 0)
    )
    tl.store(pc, acc.to(C.dtype.element_ty), boundary_check=(0, 1))


@autodiff(inputs_require_grad=(0, 1))
def batched(a, b):
    Z, M, K = a.shape
    N = b.shape[-1]
    c = a.new_empty(Z, M, N)
    bmm[(triton.cdiv(M, 64), triton.cdiv(N, 64), Z)](a, b, c, M, N, K, 64, 64, 32)
    return c

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def basis_rows(x, basis, y, R, N, K, BR: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    acc = tl.zeros((BR, BK), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        xv = tl.load(x + r[:, None] * N + n[None, :], mask=(r < R)[:, None] & (n < N)[None, :], other=0.0)
        bv = tl.load(basis + n[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        acc += tl.dot(xv, bv, input_precision="ieee")
    tl.store(y + r[:, None] * K + k[None, :], tl.log(acc + 1e-6), mask=(r < R)[:, None] & (k < K)[None, :])


@autodiff(inputs_require_grad=(0,))
def log_mel(power, basis):
    R, N = power.shape
    y = power.new_empty(R, basis.shape[1])
    basis_rows[(triton.cdiv(R, 32), triton.cdiv(basis.shape[1], 32))](
        power, basis, y, R, N, basis.shape[1], 32, 32, 32
    )
    return y

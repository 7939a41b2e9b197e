import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def nf4_gemm(
    x,
    codes,
    table,
    absmax,
    y,
    M,
    N,
    K,
    BLK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HK: tl.constexpr,
):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K // 2, HK):
        h = k0 + tl.arange(0, HK)
        nm = (n < N)[None, :] & (h < K // 2)[:, None]
        byte = tl.load(codes + n[None, :] * (K // 2) + h[:, None], mask=nm, other=0)
        amax = tl.load(absmax + (n[None, :] * K + 2 * h[:, None]) // BLK, mask=nm, other=0.0)
        hi = tl.load(table + (byte >> 4)) * amax
        lo = tl.load(table + (byte & 15)) * amax
        xm = (m < M)[:, None] & (h < K // 2)[None, :]
        acc += tl.dot(tl.load(x + m[:, None] * K + 2 * h[None, :], mask=xm, other=0.0), hi)
        acc += tl.dot(tl.load(x + m[:, None] * K + 2 * h[None, :] + 1, mask=xm, other=0.0), lo)
    tl.store(y + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


@autodiff(inputs_require_grad=(0,))
def nf4_linear(x, codes, table, absmax):
    M, K = x.shape
    y = x.new_empty(M, codes.shape[0])
    nf4_gemm[(triton.cdiv(M, 32), triton.cdiv(codes.shape[0], 32))](
        x, codes, table, absmax, y, M, y.shape[1], K, 64, 32, 32, 32
    )
    return y

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def dequant_matmul(
    a,
    packed,
    scales,
    zeros,
    c,
    M,
    N,
    K,
    GS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    shift = (rk % 8) * 4
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        av = tl.load(a + rm[:, None] * K + (k + rk)[None, :], mask=rm[:, None] < M, other=0.0)
        w = tl.load(packed + ((k + rk) // 8)[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0)
        w = (w >> shift[:, None]) & 0xF
        g = (k + rk) // GS
        s = tl.load(scales + g[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
        z = tl.load(zeros + g[:, None] * N + rn[None, :], mask=rn[None, :] < N, other=0.0)
        acc += tl.dot(av, ((w.to(tl.float32) - z) * s).to(av.dtype))
    tl.store(c + rm[:, None] * N + rn[None, :], acc, mask=(rm[:, None] < M) & (rn[None, :] < N))


@autodiff(inputs_require_grad=(0, 2))
def quant_linear(a, packed, scales, zeros, group=128):
    M, K = a.shape
    N = packed.shape[1]
    c = a.new_empty(M, N)
    dequant_matmul[(triton.cdiv(M, 32), triton.cdiv(N, 64))](
        a, packed, scales, zeros, c, M, N, K, group, 32, 64, 32
    )
    return c

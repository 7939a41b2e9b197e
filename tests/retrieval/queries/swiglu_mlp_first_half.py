import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ffn_up(x, w1, w3, h, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    g = tl.zeros((BM, BN), tl.float32)
    u = tl.zeros((BM, BN), tl.float32)
    for s in range(0, K, BK):
        rk = s + tl.arange(0, BK)
        xt = tl.load(x + rm[:, None] * K + rk[None, :], mask=(rm[:, None] < M) & (rk[None, :] < K), other=0.0)
        wm = (rk[:, None] < K) & (rn[None, :] < N)
        g += tl.dot(xt, tl.load(w1 + rk[:, None] * N + rn[None, :], mask=wm, other=0.0))
        u += tl.dot(xt, tl.load(w3 + rk[:, None] * N + rn[None, :], mask=wm, other=0.0))
    tl.store(
        h + rm[:, None] * N + rn[None, :], g * tl.sigmoid(g) * u, mask=(rm[:, None] < M) & (rn[None, :] < N)
    )


@autodiff(inputs_require_grad=(0, 1, 2))
def gated_up(x, w1, w3):
    M, K = x.shape
    N = w1.shape[1]
    h = x.new_empty(M, N)
    ffn_up[(triton.cdiv(M, 64), triton.cdiv(N, 64))](x, w1, w3, h, M, N, K, 64, 64, 32)
    return h

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def _inner(
    acc,
    l_i,
    m_i,
    q,
    K_block_ptr,
    V_block_ptr,
    start_m,
    qk_scale,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGE: tl.constexpr,
    offs_m: tl.constexpr,
    offs_n: tl.constexpr,
    N_CTX: tl.constexpr,
):
    if STAGE == 1:
        lo, hi = 0, start_m * BM
    else:
        lo, hi = start_m * BM, (start_m + 1) * BM
    K_block_ptr = tl.advance(K_block_ptr, (0, lo))
    V_block_ptr = tl.advance(V_block_ptr, (lo, 0))
    for start_n in range(lo, hi, BN):
        k = tl.load(K_block_ptr)
        qk = tl.dot(q, k)
        if STAGE == 2:
            qk = qk * qk_scale + tl.where(offs_m[:, None] >= (start_n + offs_n[None, :]), 0, -1.0e6)
            m_ij = tl.maximum(m_i, tl.max(qk, 1))
            qk -= m_ij[:, None]
        else:
            m_ij = tl.maximum(m_i, tl.max(qk, 1) * qk_scale)
            qk = qk * qk_scale - m_ij[:, None]
        p = tl.math.exp2(qk)
        alpha = tl.math.exp2(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(tl.float16), tl.load(V_block_ptr), acc)
        m_i = m_ij
        V_block_ptr = tl.advance(V_block_ptr, (BN, 0))
        K_block_ptr = tl.advance(K_block_ptr, (0, BN))
    return acc, l_i, m_i


@triton.jit
def fa_fwd(
    Q,
    K,
    V,
    sm_scale,
    M,
    Out,
    stride_h,
    stride_t,
    N_CTX: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    start_m = tl.program_id(0)
    off_hz = tl.program_id(1).to(tl.int64) * stride_h
    Qp = tl.make_block_ptr(Q + off_hz, (N_CTX, D), (stride_t, 1), (start_m * BM, 0), (BM, D), (1, 0))
    Vp = tl.make_block_ptr(V + off_hz, (N_CTX, D), (stride_t, 1), (0, 0), (BN, D), (1, 0))
    Kp = tl.make_block_ptr(K + off_hz, (D, N_CTX), (1, stride_t), (0, 0), (D, BN), (0, 1))
    Op = tl.make_block_ptr(Out + off_hz, (N_CTX, D), (stride_t, 1), (start_m * BM, 0), (BM, D), (1, 0))
    offs_m = start_m * BM + tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    m_i = tl.zeros([BM], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BM], dtype=tl.float32) + 1.0
    acc = tl.zeros([BM, D], dtype=tl.float32)
    q = tl.load(Qp)
    acc, l_i, m_i = _inner(
        acc, l_i, m_i, q, Kp, Vp, start_m, sm_scale * 1.44269504, BM, BN, 1, offs_m, offs_n, N_CTX
    )
    acc, l_i, m_i = _inner(
        acc, l_i, m_i, q, Kp, Vp, start_m, sm_scale * 1.44269504, BM, BN, 2, offs_m, offs_n, N_CTX
    )
    m_i += tl.math.log2(l_i)
    tl.store(M + tl.program_id(1) * N_CTX + offs_m, m_i)
    tl.store(Op, (acc / l_i[:, None]).to(Out.type.element_ty))


@autodiff(inputs_require_grad=(0, 1, 2))
def attention(q, k, v, sm_scale=0.125):
    Z, H, T, D = q.shape
    o = torch.empty_like(q)
    M = torch.empty((Z * H, T), device=q.device, dtype=torch.float32)
    fa_fwd[(T // 128, Z * H)](q, k, v, sm_scale, M, o, q.stride(1), q.stride(2), T, D, BM=128, BN=64)
    return o

"""The delta rule step by step, packed or padded, with initial and final states."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.heuristics(
    {
        "USE_INITIAL_STATE": lambda args: args["h0"] is not None,
        "STORE_FINAL_STATE": lambda args: args["ht"] is not None,
        "IS_VARLEN": lambda args: args["cu_seqlens"] is not None,
        "IS_BETA_HEADWISE": lambda args: args["beta"].ndim != args["v"].ndim,
    }
)
@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    q,
    k,
    v,
    beta,
    o,
    h0,
    ht,
    cu_seqlens,
    scale,
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_INITIAL_STATE: tl.constexpr,
    STORE_FINAL_STATE: tl.constexpr,
    IS_BETA_HEADWISE: tl.constexpr,
    IS_VARLEN: tl.constexpr,
):
    i_v, i_nh = tl.program_id(0), tl.program_id(1)
    i_n, i_h = i_nh // H, i_nh % H
    if IS_VARLEN:
        bos, eos = tl.load(cu_seqlens + i_n).to(tl.int64), tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        T = eos - bos
    else:
        bos, eos = i_n * T, i_n * T + T
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    p_q = q + (bos * H + i_h) * K + o_k
    p_k = k + (bos * H + i_h) * K + o_k
    p_v = v + (bos * H + i_h) * V + o_v
    p_o = o + (bos * H + i_h) * V + o_v
    p_beta = beta + bos * H + i_h
    m_k, m_v = o_k < K, o_v < V
    m_h = m_k[None, :] & m_v[:, None]
    b_h = tl.zeros([BV, BK], dtype=tl.float32)
    if USE_INITIAL_STATE:
        b_h += tl.load(h0 + i_nh * K * V + o_k[None, :] * V + o_v[:, None], mask=m_h, other=0).to(tl.float32)
    for _ in range(T):
        b_k = tl.load(p_k, mask=m_k, other=0).to(tl.float32)
        b_v = tl.load(p_v, mask=m_v, other=0).to(tl.float32)
        b_q = tl.load(p_q, mask=m_k, other=0).to(tl.float32) * scale
        b_beta = tl.load(p_beta).to(tl.float32)
        b_v -= tl.sum(b_h * b_k[None, :], axis=1)
        b_v *= b_beta
        b_h += b_k[None, :] * b_v[:, None]
        b_o = tl.sum(b_h * b_q[None, :], axis=1)
        tl.store(p_o, b_o.to(p_o.dtype.element_ty), mask=m_v)
        p_q += H * K
        p_k += H * K
        p_v += H * V
        p_o += H * V
        p_beta += H
    if STORE_FINAL_STATE:
        tl.store(ht + i_nh * K * V + o_k[None, :] * V + o_v[:, None], b_h.to(ht.dtype.element_ty), mask=m_h)


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def delta_rule(q, k, v, beta, h0=None, output_final_state=False, cu_seqlens=None):
    B, T, H, K, V = *k.shape, v.shape[-1]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    BK, BV = triton.next_power_of_2(K), min(triton.next_power_of_2(V), 8)
    o = torch.empty_like(v)
    ht = q.new_empty(N, H, K, V, dtype=torch.float32) if output_final_state else None
    delta_kernel[(triton.cdiv(V, BV), N * H)](
        q, k, v, beta, o, h0, ht, cu_seqlens, K**-0.5, T, H=H, K=K, V=V, BK=BK, BV=BV
    )
    return o, ht


SWEEP = [
    {"B": 2, "T": 7, "H": 2, "K": 8, "V": 12, "state": True, "packed": False},
    {"B": 1, "T": 11, "H": 1, "K": 6, "V": 8, "state": True, "packed": True},
    {"B": 1, "T": 5, "H": 2, "K": 16, "V": 16, "state": False, "packed": False},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H, K, V = (dims[n] for n in "BTHKV")
    q, k = (
        torch.nn.functional.normalize(torch.randn(B, T, H, K, device=device, dtype=dtype), dim=-1)
        for _ in range(2)
    )
    v = torch.randn(B, T, H, V, device=device, dtype=dtype)
    beta = torch.rand(B, T, H, device=device, dtype=dtype)
    cu = torch.tensor(sorted({0, T // 3, T}), device=device) if dims["packed"] and B == 1 else None
    N = B if cu is None else len(cu) - 1
    h0 = torch.randn(N, H, K, V, device=device, dtype=dtype) if dims["state"] else None
    return (q, k, v, beta, h0), {"output_final_state": dims["state"], "cu_seqlens": cu}

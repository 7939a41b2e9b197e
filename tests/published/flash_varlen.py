"""Attention of packed sequences: grouped queries, causal, sliding window, logit softcap; LSE kept."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from ops.utils import packed

try:
    from triton.language.extra.libdevice import tanh
except ImportError:
    from triton.language.extra.cuda.libdevice import tanh


@triton.heuristics({"EVEN_D": lambda args: args["D"] == args["BD"]})
@triton.jit
def varlen_fwd_kernel(
    q, k, v, o, lse, cu_seqlens, scale, softcap, window, HQ, T,
    stride_qt, stride_qh, stride_kt, stride_kh,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    i_t, i_nh = tl.program_id(0), tl.program_id(1)
    i_n, i_h = i_nh // HQ, i_nh % HQ
    i_kh = i_h // G
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    n = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
    if i_t * BT >= n:
        return
    o_q = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    m_d = (o_d < D) if not EVEN_D else tl.full((BD,), True, tl.int1)
    q_mask = (o_q < n)[:, None] & m_d[None, :]
    b_q = tl.load(
        q + (bos + o_q)[:, None] * stride_qt + i_h * stride_qh + o_d[None, :], mask=q_mask, other=0.0
    )
    b_m = tl.full([BT], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BT], dtype=tl.float32)
    b_o = tl.zeros([BT, BD], dtype=tl.float32)
    for start in range(0, n, BS):
        o_k = start + tl.arange(0, BS)
        k_mask = (o_k < n)[:, None] & m_d[None, :]
        at = (bos + o_k)[:, None] * stride_kt + i_kh * stride_kh + o_d[None, :]
        b_k = tl.load(k + at, mask=k_mask, other=0.0)
        b_v = tl.load(v + at, mask=k_mask, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * scale
        if HAS_SOFTCAP:
            b_s = softcap * tanh(b_s / softcap)
        keep = (o_k < n)[None, :]
        if CAUSAL:
            keep = keep & (o_q[:, None] >= o_k[None, :])
        if HAS_WINDOW:
            keep = keep & (o_q[:, None] - o_k[None, :] < window)
        b_s = tl.where(keep, b_s * 1.4426950408889634, -1.0e30)
        m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_p = tl.where(keep, tl.exp2(b_s - m_new[:, None]), 0.0)
        alpha = tl.exp2(b_m - m_new)
        b_l = b_l * alpha + tl.sum(b_p, 1)
        b_o = b_o * alpha[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_m = m_new
    b_o = b_o / b_l[:, None]
    tl.store(lse + (bos + o_q) * HQ + i_h, b_m + tl.log2(b_l), mask=o_q < n)
    tl.store(o + (bos + o_q)[:, None] * stride_qt + i_h * stride_qh + o_d[None, :], b_o, mask=q_mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def flash_attn_varlen(q, k, v, cu_seqlens, softmax_scale=None, causal=True, window=None, softcap=0.0):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    T, HQ, D = q.shape
    N = len(cu_seqlens) - 1
    o = torch.empty_like(q)
    lse = torch.empty(T, HQ, device=q.device, dtype=torch.float32)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    BT = 16 if longest < 128 else 64
    varlen_fwd_kernel[(triton.cdiv(longest, BT), N * HQ)](
        q, k, v, o, lse, cu_seqlens, softmax_scale or D**-0.5, softcap, window or 0, HQ, T,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        G=HQ // k.shape[1], D=D, BD=max(16, triton.next_power_of_2(D)), BT=BT, BS=16,
        CAUSAL=causal, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap > 0,
    )  # fmt: skip
    return o


SWEEP = [
    {"T": 45, "HK": 2, "G": 2, "D": 20, "causal": True, "window": 9, "cap": 4.0},
    {"T": 40, "HK": 1, "G": 2, "D": 16, "causal": False, "window": 0, "cap": 0.0},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    T, HK, D = dims["T"], dims["HK"], dims["D"]
    q = torch.randn(T, HK * dims["G"], D, device=device, dtype=dtype)
    k, v = (torch.randn(T, HK, D, device=device, dtype=dtype) for _ in range(2))
    kwargs = {"causal": dims["causal"], "window": dims["window"] or None, "softcap": dims["cap"]}
    return (q, k, v, packed(T, device)), kwargs

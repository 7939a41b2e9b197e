"""Attention with an optional bias, of a row or of the whole score matrix; heuristics for even sizes."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.heuristics({"EVEN_N": lambda args: args["seqlen"] % args["BLOCK_N"] == 0})
@triton.jit
def bias_fwd_kernel(
    Q, K, V, Bias, Out, softmax_scale, stride_b, stride_h, stride_m, stride_bb, stride_bh, stride_bm,
    nheads, seqlen, D: tl.constexpr, BIAS_TYPE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    off_hb = tl.program_id(1)
    off_b = off_hb // nheads
    off_h = off_hb % nheads
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    base = off_b * stride_b + off_h * stride_h
    q_ptrs = Q + base + (offs_m[:, None] * stride_m + offs_d[None, :])
    k_ptrs = K + base + (offs_n[:, None] * stride_m + offs_d[None, :])
    v_ptrs = V + base + (offs_n[:, None] * stride_m + offs_d[None, :])
    if BIAS_TYPE == "vector":
        b_ptrs = Bias + off_b * stride_bb + off_h * stride_bh + offs_n
    elif BIAS_TYPE == "matrix":
        b_ptrs = (
            Bias + off_b * stride_bb + off_h * stride_bh + (offs_m[:, None] * stride_bm + offs_n[None, :])
        )
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    q = tl.load(q_ptrs, mask=offs_m[:, None] < seqlen, other=0.0)
    end_n = seqlen if not IS_CAUSAL else tl.minimum((start_m + 1) * BLOCK_M, seqlen)
    for start_n in range(0, end_n, BLOCK_N):
        start_n = tl.multiple_of(start_n, BLOCK_N)
        inside = (start_n + offs_n) < seqlen
        k = tl.load(k_ptrs + start_n * stride_m, mask=inside[:, None], other=0.0)
        qk = tl.dot(q, tl.trans(k)) * softmax_scale
        if not EVEN_N:
            qk += tl.where(inside[None, :], 0, float("-inf"))
        if IS_CAUSAL:
            qk += tl.where(offs_m[:, None] >= (start_n + offs_n)[None, :], 0, float("-inf"))
        if BIAS_TYPE == "vector":
            bias = tl.load(b_ptrs + start_n, mask=inside, other=0.0)
            qk += bias[None, :]
        elif BIAS_TYPE == "matrix":
            bias = tl.load(b_ptrs + start_n, mask=(offs_m < seqlen)[:, None] & inside[None, :], other=0.0)
            qk += bias
        m_ij = tl.maximum(tl.max(qk, 1), m_i)
        p = tl.exp(qk - m_ij[:, None])
        alpha = tl.exp(m_i - m_ij)
        l_i = l_i * alpha + tl.sum(p, 1)
        v = tl.load(v_ptrs + start_n * stride_m, mask=inside[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m_i = m_ij
    acc = acc / l_i[:, None]
    out_ptrs = Out + base + (offs_m[:, None] * stride_m + offs_d[None, :])
    tl.store(out_ptrs, acc, mask=offs_m[:, None] < seqlen)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def flash_attn(q, k, v, bias=None, causal=False, softmax_scale=None):
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, nheads, seqlen, d = q.shape
    kind, strides = "none", (0, 0, 0)
    if bias is not None:
        bias = bias.contiguous()
        kind = "vector" if bias.shape[2] == 1 else "matrix"
        strides = bias.stride()[:3]
    o = torch.empty_like(q)
    grid = lambda META: (triton.cdiv(seqlen, META["BLOCK_M"]), batch * nheads)
    bias_fwd_kernel[grid](
        q, k, v, bias, o, softmax_scale or d**-0.5, q.stride(0), q.stride(1), q.stride(2),
        strides[0], strides[1], strides[2], nheads, seqlen,
        D=d, BIAS_TYPE=kind, IS_CAUSAL=causal, BLOCK_M=16, BLOCK_N=16,
    )  # fmt: skip
    return o


SWEEP = [
    {"B": 2, "H": 2, "N": 37, "D": 16, "bias": "matrix", "causal": True},
    {"B": 1, "H": 2, "N": 32, "D": 16, "bias": "vector", "causal": False},
    {"B": 1, "H": 1, "N": 20, "D": 16, "bias": "none", "causal": False},
]
SWEEP_CPU = SWEEP


def make_args(dims, device="cuda", dtype=torch.float32):
    B, H, N, D = (dims[name] for name in "BHND")
    q, k, v = (torch.randn(B, H, N, D, device=device, dtype=dtype) for _ in range(3))
    rows = {"matrix": N, "vector": 1}.get(dims["bias"])
    bias = torch.randn(B, H, rows, N, device=device, dtype=dtype) if rows else None
    return q, k, v, bias, dims["causal"]

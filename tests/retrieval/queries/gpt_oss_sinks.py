import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sink_attn(
    q_ptr,
    k_ptr,
    v_ptr,
    sink_ptr,
    out_ptr,
    heads,
    T,
    scale,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    bh = tl.program_id(0)
    qs = tl.program_id(1) * BQ + tl.arange(0, BQ)
    ds = tl.arange(0, D)
    off = bh.to(tl.int64) * T * D
    sink = tl.load(sink_ptr + bh % heads).to(tl.float32)
    q = tl.load(q_ptr + off + qs[:, None] * D + ds, mask=qs[:, None] < T, other=0.0)
    m_prev = tl.zeros((BQ,), tl.float32) + sink
    den = tl.full((BQ,), 1.0, tl.float32)
    acc = tl.zeros((BQ, D), tl.float32)
    for start in tl.range(0, tl.minimum(T, (tl.program_id(1) + 1) * BQ), BK):
        ks = start + tl.arange(0, BK)
        k = tl.load(k_ptr + off + ks[:, None] * D + ds, mask=ks[:, None] < T, other=0.0)
        x = tl.dot(q, k.T) * scale
        x = tl.where(qs[:, None] >= ks[None, :], x, -1e30)
        m_new = tl.maximum(m_prev, tl.max(x, 1))
        p = tl.exp(x - m_new[:, None])
        c = tl.exp(m_prev - m_new)
        den = den * c + tl.sum(p, 1)
        v = tl.load(v_ptr + off + ks[:, None] * D + ds, mask=ks[:, None] < T, other=0.0)
        acc = acc * c[:, None] + tl.dot(p, v.to(tl.float32))
        m_prev = m_new
    tl.store(out_ptr + off + qs[:, None] * D + ds, acc / den[:, None], mask=qs[:, None] < T)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def attention_with_sinks(q, k, v, sinks):
    B, H, T, D = q.shape
    out = torch.empty_like(q)
    sink_attn[(B * H, triton.cdiv(T, 64))](q, k, v, sinks, out, H, T, D**-0.5, D=D, BQ=64, BK=32)
    return out

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def fused_recurrent_delta(
    q, k, v, beta, gate, o, T, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    i_h, i_v = tl.program_id(0), tl.program_id(1)
    ok = tl.arange(0, K)
    ov = i_v * BV + tl.arange(0, BV)
    mv = ov < V
    state = tl.zeros([BV, K], dtype=tl.float32)
    q += i_h * T * K
    k += i_h * T * K
    v += i_h * T * V
    o += i_h * T * V
    for t in range(0, T):
        b_k = tl.load(k + ok).to(tl.float32)
        b_q = tl.load(q + ok).to(tl.float32) * scale
        b_v = tl.load(v + ov, mask=mv, other=0).to(tl.float32)
        b_g = tl.load(gate + i_h * T + t)
        b_b = tl.load(beta + i_h * T + t)
        state *= tl.exp(b_g)
        b_u = b_b * (b_v - tl.sum(state * b_k[None, :], axis=1))
        state += b_u[:, None] * b_k[None, :]
        tl.store(o + ov, tl.sum(state * b_q[None, :], axis=1), mask=mv)
        q += K
        k += K
        v += V
        o += V


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def gated_delta(q, k, v, beta, gate):
    H, T, K = q.shape
    V = v.shape[-1]
    o = torch.empty_like(v)
    fused_recurrent_delta[(H, triton.cdiv(V, 8))](q, k, v, beta, gate, o, T, K**-0.5, K, V, BV=8)
    return o

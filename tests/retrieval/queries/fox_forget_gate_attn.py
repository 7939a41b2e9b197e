import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def decay_attention(q, k, v, log_f_cum, o, T, scale, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr):
    i_t, i_h = tl.program_id(0), tl.program_id(1)
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, D)
    q += i_h * T * D
    k += i_h * T * D
    v += i_h * T * D
    b_q = tl.load(q + o_t[:, None] * D + o_d[None, :], mask=(o_t < T)[:, None], other=0.0)
    b_fq = tl.load(log_f_cum + i_h * T + o_t, mask=o_t < T, other=0.0)
    b_m = tl.full([BT], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BT], dtype=tl.float32)
    b_o = tl.zeros([BT, D], dtype=tl.float32)
    for i_s in range(0, (i_t + 1) * BT, BS):
        o_s = i_s + tl.arange(0, BS)
        b_k = tl.load(k + o_s[None, :] * D + o_d[:, None], mask=(o_s < T)[None, :], other=0.0)
        b_v = tl.load(v + o_s[:, None] * D + o_d[None, :], mask=(o_s < T)[:, None], other=0.0)
        b_fk = tl.load(log_f_cum + i_h * T + o_s, mask=o_s < T, other=0.0)
        b_s = tl.dot(b_q, b_k) * scale + b_fq[:, None] - b_fk[None, :]
        b_s = tl.where((o_t[:, None] >= o_s[None, :]) & (o_s < T)[None, :], b_s, float("-inf"))
        b_m, b_mp = tl.maximum(b_m, tl.max(b_s, 1)), b_m
        b_r = tl.exp(b_mp - b_m)
        b_p = tl.exp(b_s - b_m[:, None])
        b_l = b_l * b_r + tl.sum(b_p, 1)
        b_o = b_o * b_r[:, None] + tl.dot(b_p.to(b_q.dtype), b_v)
    tl.store(o + i_h * T * D + o_t[:, None] * D + o_d[None, :], b_o / b_l[:, None], mask=(o_t < T)[:, None])


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def forgetting_attention(q, k, v, log_f):
    H, T, D = q.shape
    cum = log_f.float().cumsum(-1)
    o = torch.empty_like(q)
    decay_attention[(triton.cdiv(T, 64), H)](q, k, v, cum, o, T, D**-0.5, D=D, BT=64, BS=64)
    return o

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def biased_attention(q, k, v, bias, out, H, S, sm, HD: tl.constexpr, BLK: tl.constexpr):
    pid, bh = tl.program_id(0), tl.program_id(1)
    h = bh % H
    q += bh * S * HD
    k += bh * S * HD
    v += bh * S * HD
    out += bh * S * HD
    bias += h * S * S
    a = pid * BLK + tl.arange(0, BLK)
    e = tl.arange(0, HD)
    qa = tl.load(q + a[:, None] * HD + e[None, :], mask=a[:, None] < S, other=0)
    hi = tl.full([BLK], -1e9, tl.float32)
    zs = tl.zeros([BLK], tl.float32)
    r = tl.zeros([BLK, HD], tl.float32)
    for b0 in range(0, S, BLK):
        b = b0 + tl.arange(0, BLK)
        inside = (a[:, None] < S) & (b[None, :] < S)
        kb = tl.load(k + b[:, None] * HD + e[None, :], mask=b[:, None] < S, other=0)
        w = tl.dot(qa, tl.trans(kb)) * sm
        w += tl.load(bias + a[:, None] * S + b[None, :], mask=inside, other=0).to(tl.float32)
        w = tl.where(b[None, :] < S, w, -1e9)
        nh = tl.maximum(hi, tl.max(w, axis=1))
        w = tl.exp(w - nh[:, None])
        fix = tl.exp(hi - nh)
        zs = zs * fix + tl.sum(w, axis=1)
        vb = tl.load(v + b[:, None] * HD + e[None, :], mask=b[:, None] < S, other=0)
        r = r * fix[:, None] + tl.dot(w.to(vb.dtype), vb)
        hi = nh
    tl.store(out + a[:, None] * HD + e[None, :], r / zs[:, None], mask=a[:, None] < S)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def attention_bias(q, k, v, bias):
    B, H, S, D = q.shape
    out = torch.empty_like(q)
    biased_attention[(triton.cdiv(S, 64), B * H)](q, k, v, bias, out, H, S, D**-0.5, HD=D, BLK=64)
    return out

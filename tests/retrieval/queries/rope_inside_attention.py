import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rot_attn(Q, K, V, C, S, O, T, sc, HALF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    D: tl.constexpr = 2 * HALF
    pm, bh = tl.program_id(0), tl.program_id(1)
    Q += bh * T * D
    K += bh * T * D
    V += bh * T * D
    O += bh * T * D
    m = pm * BM + tl.arange(0, BM)
    f = tl.arange(0, HALF)
    full = tl.arange(0, D)
    q1 = tl.load(Q + m[:, None] * D + f, mask=m[:, None] < T, other=0.0)
    q2 = tl.load(Q + m[:, None] * D + HALF + f, mask=m[:, None] < T, other=0.0)
    cm = tl.load(C + m[:, None] * HALF + f, mask=m[:, None] < T, other=1.0)
    sm = tl.load(S + m[:, None] * HALF + f, mask=m[:, None] < T, other=0.0)
    qa = q1 * cm - q2 * sm
    qb = q2 * cm + q1 * sm
    mx = tl.full([BM], -1e30, tl.float32)
    den = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for s0 in range(0, (pm + 1) * BM, BN):
        n = s0 + tl.arange(0, BN)
        k1 = tl.load(K + n[:, None] * D + f, mask=n[:, None] < T, other=0.0)
        k2 = tl.load(K + n[:, None] * D + HALF + f, mask=n[:, None] < T, other=0.0)
        cn = tl.load(C + n[:, None] * HALF + f, mask=n[:, None] < T, other=1.0)
        sn = tl.load(S + n[:, None] * HALF + f, mask=n[:, None] < T, other=0.0)
        w = tl.dot(qa, tl.trans(k1 * cn - k2 * sn)) + tl.dot(qb, tl.trans(k2 * cn + k1 * sn))
        w = tl.where((m[:, None] >= n[None, :]) & (n[None, :] < T), w * sc, -1e30)
        nx = tl.maximum(mx, tl.max(w, 1))
        p = tl.exp(w - nx[:, None])
        c = tl.exp(mx - nx)
        den = den * c + tl.sum(p, 1)
        v = tl.load(V + n[:, None] * D + full, mask=n[:, None] < T, other=0.0)
        acc = acc * c[:, None] + tl.dot(p, v)
        mx = nx
    tl.store(O + m[:, None] * D + full, acc / den[:, None], mask=m[:, None] < T)


@autodiff(inputs_require_grad=(0, 1, 2))
def rotary_attention(q, k, v, cos, sin):
    BH, T, D = q.shape
    o = torch.empty_like(q)
    rot_attn[(triton.cdiv(T, 32), BH)](q, k, v, cos, sin, o, T, D**-0.5, HALF=D // 2, BM=32, BN=32)
    return o

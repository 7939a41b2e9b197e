import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ssd_chunk(x, dt, a, Bm, Cm, y, T, H, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr):
    b, h = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, Q)
    p = tl.arange(0, P)
    n = tl.arange(0, N)
    ah = tl.load(a + h)
    S = tl.zeros((N, P), tl.float32)
    for c in range(0, T, Q):
        t = c + i
        ok = t < T
        d = tl.load(dt + (b * T + t) * H + h, mask=ok, other=0.0)
        cs = tl.cumsum(d * ah, axis=0)
        xt = (
            tl.load(x + ((b * T + t) * H + h)[:, None] * P + p[None, :], mask=ok[:, None], other=0.0)
            * d[:, None]
        )
        bt = tl.load(Bm + (b * T + t)[:, None] * N + n[None, :], mask=ok[:, None], other=0.0)
        ct = tl.load(Cm + (b * T + t)[:, None] * N + n[None, :], mask=ok[:, None], other=0.0)
        att = tl.dot(ct, tl.trans(bt)) * tl.where(
            i[:, None] >= i[None, :], tl.exp(cs[:, None] - cs[None, :]), 0.0
        )
        out = tl.dot(att, xt) + tl.dot(ct, S) * tl.exp(cs)[:, None]
        last = tl.sum(d * ah, axis=0)
        S = S * tl.exp(last) + tl.dot(tl.trans(bt * tl.exp(last - cs)[:, None]), xt)
        tl.store(y + ((b * T + t) * H + h)[:, None] * P + p[None, :], out, mask=ok[:, None])


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def ssd(x, dt, a, Bm, Cm):
    B, T, H, P = x.shape
    y = torch.empty_like(x)
    ssd_chunk[(B, H)](x, dt, a, Bm, Cm, y, T, H, P, Bm.shape[-1], 64)
    return y

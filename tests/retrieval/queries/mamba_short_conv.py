import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def short_conv(u, w, b, y, L, D, TAPS: tl.constexpr, TL: tl.constexpr, TD: tl.constexpr):
    bt = tl.program_id(2)
    t = tl.program_id(0) * TL + tl.arange(0, TL)
    d = tl.program_id(1) * TD + tl.arange(0, TD)
    dm = d < D
    acc = tl.zeros((TL, TD), tl.float32) + tl.load(b + d, mask=dm, other=0.0)[None, :]
    for k in tl.static_range(TAPS):
        s = t - (TAPS - 1) + k
        wk = tl.load(w + d * TAPS + k, mask=dm, other=0.0)
        uk = tl.load(
            u + (bt * L + s)[:, None] * D + d[None, :],
            mask=((s >= 0) & (s < L))[:, None] & dm[None, :],
            other=0.0,
        )
        acc += uk * wk[None, :]
    acc = acc * tl.sigmoid(acc)
    tl.store(y + (bt * L + t)[:, None] * D + d[None, :], acc, mask=(t < L)[:, None] & dm[None, :])


@autodiff(inputs_require_grad=(0, 1, 2))
def causal_conv1d(u, w, b):
    B, L, D = u.shape
    y = torch.empty_like(u)
    short_conv[(triton.cdiv(L, 32), triton.cdiv(D, 64), B)](u, w, b, y, L, D, TAPS=w.shape[1], TL=32, TD=64)
    return y

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def tridiagonale(sotto, diag, sopra, noto, c, d, x, n, sistemi, B: tl.constexpr):
    s = tl.program_id(0) * B + tl.arange(0, B)
    ok = s < sistemi
    # eliminazione in avanti
    cp = tl.zeros((B,), tl.float32)
    dp = tl.zeros((B,), tl.float32)
    for i in range(n):
        a = tl.load(sotto + i * sistemi + s, mask=ok, other=0.0)
        den = tl.load(diag + i * sistemi + s, mask=ok, other=1.0) - a * cp
        cp = tl.load(sopra + i * sistemi + s, mask=ok, other=0.0) / den
        dp = (tl.load(noto + i * sistemi + s, mask=ok, other=0.0) - a * dp) / den
        tl.store(c + i * sistemi + s, cp, mask=ok)
        tl.store(d + i * sistemi + s, dp, mask=ok)
    # sostituzione all'indietro
    v = tl.zeros((B,), tl.float32)
    for k in range(n):
        i = n - 1 - k
        v = (
            tl.load(d + i * sistemi + s, mask=ok, other=0.0)
            - tl.load(c + i * sistemi + s, mask=ok, other=0.0) * v
        )
        tl.store(x + i * sistemi + s, v, mask=ok)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def risolvi(sotto, diag, sopra, noto):
    n, sistemi = diag.shape
    c, d, x = torch.empty_like(diag), torch.empty_like(diag), torch.empty_like(diag)
    tridiagonale[(triton.cdiv(sistemi, 64),)](sotto, diag, sopra, noto, c, d, x, n, sistemi, B=64)
    return x

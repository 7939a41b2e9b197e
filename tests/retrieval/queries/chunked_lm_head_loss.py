import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def logits_chunk(h, w, lg, R, V, D, BR: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    acc = tl.zeros((BR, BV), tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        acc += tl.dot(
            tl.load(h + r[:, None] * D + d[None, :], mask=(r < R)[:, None] & (d < D)[None, :], other=0.0),
            tl.load(w + v[None, :] * D + d[:, None], mask=(v < V)[None, :] & (d < D)[:, None], other=0.0),
        )
    tl.store(lg + r[:, None] * V + v[None, :], acc, mask=(r < R)[:, None] & (v < V)[None, :])


@triton.jit
def nll(lg, y, out, V, B: tl.constexpr):
    r = tl.program_id(0)
    m, s = -float("inf"), 0.0
    for v0 in range(0, V, B):
        v = v0 + tl.arange(0, B)
        z = tl.load(lg + r * V + v, mask=v < V, other=-float("inf"))
        n = tl.maximum(m, tl.max(z, 0))
        s = s * tl.exp(m - n) + tl.sum(tl.exp(z - n), 0)
        m = n
    tl.store(out + r, m + tl.log(s) - tl.load(lg + r * V + tl.load(y + r)))


@autodiff(inputs_require_grad=(0, 1))
def chunked_loss(h, w, y, chunk=1024):
    T, D = h.shape
    V = w.shape[0]
    out = torch.empty(T, device=h.device)
    for a in range(0, T, chunk):
        rows = min(chunk, T - a)
        lg = torch.empty(rows, V, device=h.device)
        logits_chunk[(triton.cdiv(rows, 64), triton.cdiv(V, 64))](h[a:], w, lg, rows, V, D, 64, 64, 32)
        nll[(rows,)](lg, y[a:], out[a:], V, B=1024)
    return out

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def head_loss(x, w, t, lse_out, loss_out, M, V, D, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    target = tl.load(t + m, mask=m < M, other=0)
    hi = tl.full((BM,), -1e30, tl.float32)
    z = tl.zeros((BM,), tl.float32)
    picked = tl.zeros((BM,), tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        s = tl.zeros((BM, BV), tl.float32)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            a = tl.load(x + m[:, None] * D + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
            b = tl.load(w + v[None, :] * D + d[:, None], mask=(v < V)[None, :] & (d < D)[:, None], other=0.0)
            s += tl.dot(a, b)
        s = tl.where((v < V)[None, :], s, -1e30)
        picked += tl.sum(tl.where(v[None, :] == target[:, None], s, 0.0), 1)
        nh = tl.maximum(hi, tl.max(s, 1))
        z = z * tl.exp(hi - nh) + tl.sum(tl.exp(s - nh[:, None]), 1)
        hi = nh
    lse = hi + tl.log(z)
    tl.store(lse_out + m, lse, mask=m < M)
    tl.store(loss_out + m, lse - picked, mask=m < M)


@autodiff(inputs_require_grad=(0, 1))
def linear_cross_entropy(x, w, t):
    M, D = x.shape
    lse, loss = torch.empty(M, device=x.device), torch.empty(M, device=x.device)
    head_loss[(triton.cdiv(M, 32),)](x, w, t, lse, loss, M, w.shape[0], D, 32, 64, 32)
    return loss

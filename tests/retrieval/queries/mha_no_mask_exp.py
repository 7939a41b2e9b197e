import torch, triton, triton.language as tl
from kernel_agent import autodiff


@triton.jit
def att(q, k, v, o, L, scale, D: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    h = tl.program_id(1)
    q += h * L * D
    k += h * L * D
    v += h * L * D
    o += h * L * D
    i = tl.program_id(0) * A + tl.arange(0, A)
    e = tl.arange(0, D)
    x = tl.load(q + i[:, None] * D + e, mask=i[:, None] < L, other=0.0) * scale
    mx = tl.full((A,), -1e38, tl.float32)
    den = tl.zeros((A,), tl.float32)
    num = tl.zeros((A, D), tl.float32)
    for s in range(0, L, B):
        j = s + tl.arange(0, B)
        w = tl.dot(x, tl.trans(tl.load(k + j[:, None] * D + e, mask=j[:, None] < L, other=0.0)))
        w = tl.where(j[None, :] < L, w, -1e38)
        m2 = tl.maximum(mx, tl.max(w, axis=1))
        w = tl.exp(w - m2[:, None])
        c = tl.exp(mx - m2)
        den = den * c + tl.sum(w, axis=1)
        num = num * c[:, None] + tl.dot(w, tl.load(v + j[:, None] * D + e, mask=j[:, None] < L, other=0.0))
        mx = m2
    tl.store(o + i[:, None] * D + e, num / den[:, None], mask=i[:, None] < L)


@autodiff(inputs_require_grad=(0, 1, 2))
def mha(q, k, v):
    H, L, D = q.shape
    o = torch.empty_like(q)
    att[(triton.cdiv(L, 32), H)](q, k, v, o, L, D**-0.5, D, 32, 32)
    return o

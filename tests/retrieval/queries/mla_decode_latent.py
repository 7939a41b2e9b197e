import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def latent_attention(
    q_nope,
    q_pe,
    c_kv,
    k_pe,
    out,
    S,
    sm_scale,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
):
    t = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    r = tl.arange(0, R)
    p = tl.arange(0, P)
    qn = tl.load(q_nope + (t * H + h)[:, None] * R + r[None, :], mask=h[:, None] < H, other=0.0)
    qp = tl.load(q_pe + (t * H + h)[:, None] * P + p[None, :], mask=h[:, None] < H, other=0.0)
    top = tl.full((BH,), float("-inf"), tl.float32)
    tot = tl.zeros((BH,), tl.float32)
    ctx = tl.zeros((BH, R), tl.float32)
    for s in range(0, t + 1, BS):
        j = s + tl.arange(0, BS)
        c = tl.load(c_kv + j[:, None] * R + r[None, :], mask=j[:, None] <= t, other=0.0)
        kp = tl.load(k_pe + j[:, None] * P + p[None, :], mask=j[:, None] <= t, other=0.0)
        w = (tl.dot(qn, tl.trans(c)) + tl.dot(qp, tl.trans(kp))) * sm_scale
        w = tl.where(j[None, :] <= t, w, float("-inf"))
        nt = tl.maximum(top, tl.max(w, 1))
        w = tl.exp(w - nt[:, None])
        k = tl.exp(top - nt)
        tot = tot * k + tl.sum(w, 1)
        ctx = ctx * k[:, None] + tl.dot(w.to(c.dtype), c)
        top = nt
    tl.store(out + (t * H + h)[:, None] * R + r[None, :], ctx / tot[:, None], mask=h[:, None] < H)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def mla(q_nope, q_pe, c_kv, k_pe):
    T, H, R = q_nope.shape
    P = q_pe.shape[-1]
    out = torch.empty_like(q_nope)
    latent_attention[(T, triton.cdiv(H, 16))](
        q_nope, q_pe, c_kv, k_pe, out, T, (R + P) ** -0.5, H, R, P, BH=16, BS=32
    )
    return out

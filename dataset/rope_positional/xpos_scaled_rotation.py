"""xPos: a rotation whose length decays with distance, so that far keys count less; queries and keys at once.

Forward    token t turns pair i of a head, (i, i + D / 2), by a = t base^(-2i/D) and scales it by
           m = s_i^(t / S) in q and 1 / m in k,  s_i = (2i / D + g) / (1 + g):
           y1 = m (x1 cos a - x2 sin a),  y2 = m (x2 cos a + x1 sin a).
           In <q_t, k_u> there remains s_i^((t - u) / S)
Backward   the map is m times an orthogonal matrix, so its transpose is m times the turn back (its inverse
           would be 1 / m times that):  dx1 = m (dy1 cos a + dy2 sin a),  dx2 = m (dy2 cos a - dy1 sin a)

Forward schedule: one launch for q and k: a program owns (token, tile of the heads of q, then k). Sine, cosine
and the logarithm of m are made once for all of its heads; which way m goes is a comparison with the head.
The kernel is given the base, which float32 holds, not its logarithm, which on the way there is rounded: late
tokens multiply that by thousands.
Backward schedule: the forward with the sine's sign flipped and m unchanged. A backward that calls the
forward's inverse, which is right for a pure rotation, would here divide by m twice. Nothing is saved; times
are counted from the middle of the sequence, so that neither m nor 1 / m leaves the range of a short float.

op: xpos
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def turn(x_ptr, y_ptr, offs, mask, half, c, s):
    x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (x1 * c - x2 * s).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offs + half, (x2 * c + x1 * s).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def xpos_kernel(
    q_ptr, k_ptr, yq_ptr, yk_ptr, T, HQ, HK, HALF, base, gamma, span,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_D)
    t = token % T
    place = i.to(tl.float32) / HALF
    angle = t.to(tl.float32) * tl.exp2(-place * tl.log2(base))
    decay = tl.log2((place + gamma) / (1 + gamma))
    power = decay * (t - T // 2).to(tl.float32) / span
    m = tl.exp2(tl.where(h < HQ, 1.0, -1.0)[:, None] * power[None, :])
    c, s = m * tl.cos(angle)[None, :], m * SIGN * tl.sin(angle)[None, :]
    inside = (i < HALF)[None, :]
    q_offs = (token * HQ + h[:, None]) * (2 * HALF) + i[None, :]
    turn(q_ptr, yq_ptr, q_offs, (h < HQ)[:, None] & inside, HALF, c, s)
    k_offs = (token * HK + h[:, None] - HQ) * (2 * HALF) + i[None, :]
    turn(k_ptr, yk_ptr, k_offs, ((h >= HQ) & (h < HQ + HK))[:, None] & inside, HALF, c, s)


def both(q, k, base, gamma, span, sign):
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    if D % 2 or k.shape != (B, T, HK, D):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit, or {D} is odd")
    yq, yk = torch.empty_like(q), torch.empty_like(k)
    xpos_kernel[(B * T, triton.cdiv(HQ + HK, 8))](
        q, k, yq, yk, T, HQ, HK, D // 2, float(base), gamma, span,
        SIGN=sign, BLOCK_H=8, BLOCK_D=max(1, triton.next_power_of_2(D // 2)),
    )  # fmt: skip
    return yq, yk


@autodiff(inputs_require_grad=(0, 1))
def xpos(q, k, base=10000.0, gamma=0.4, span=512.0):
    """q: (B, T, HQ, D); k: (B, T, HK, D), D even."""
    return both(q.contiguous(), k.contiguous(), base, gamma, span, 1)


def reference(q, k, base=10000.0, gamma=0.4, span=512.0):
    T, half = q.shape[1], q.shape[3] // 2
    i = torch.arange(half, device=q.device, dtype=q.dtype) / max(1, half)
    t = torch.arange(T, device=q.device)[:, None]
    angle = (t.to(q.dtype) * base**-i)[:, None, :]
    m = (((i + gamma) / (1 + gamma)) ** ((t - T // 2).to(q.dtype) / span))[:, None, :]
    c, s = angle.cos(), angle.sin()

    def turned(x, m):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([m * (x1 * c - x2 * s), m * (x2 * c + x1 * s)], dim=-1)

    return turned(q, m), turned(k, 1 / m)


SWEEP = [
    {"B": 2, "T": 2048, "HQ": 32, "HK": 8, "half": 64},
    {"B": 3, "T": 999, "HQ": 5, "HK": 5, "half": 40},
]
SWEEP_CPU = [
    {"B": 1, "T": 23, "HQ": 2, "HK": 2, "half": 16},
    {"B": 2, "T": 7, "HQ": 9, "HK": 1, "half": 5},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], 2 * dims["half"]
    return tuple(torch.randn(B, T, dims[h], D, device=device, dtype=dtype) for h in ("HQ", "HK"))


# ---- backward ----


class XPos(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, base, gamma, span):
        ctx.options = base, gamma, span
        return xpos(q, k, base, gamma, span)

    @staticmethod
    def backward(ctx, dyq, dyk):
        needs = ctx.needs_input_grad
        if not needs[0]:
            dyq = dyq[:, :, :0]  # no heads in the grid
        if not needs[1]:
            dyk = dyk[:, :, :0]
        dq, dk = both(dyq.contiguous(), dyk.contiguous(), *ctx.options, -1)
        return dq if needs[0] else None, dk if needs[1] else None, None, None, None


def xpos_autograd(q, k, base=10000.0, gamma=0.4, span=512.0):
    return XPos.apply(q, k, base, gamma, span)

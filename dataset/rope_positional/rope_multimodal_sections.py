"""Rotary position in three sections (time, height, width) for tokens of text, images and video.

Forward    the channel pairs (d, d + D/2) are dealt to three sections; pair d of token t turns by the angle
           a_td = position[section(d), t] base^(-2d/D):   y1 = x1 c - x2 s,  y2 = x2 c + x1 s
Backward   each pair is turned by a matrix that is orthogonal whatever its angle, so its adjoint is the turn
           back:  dx1 = dy1 c + dy2 s,  dx2 = dy2 c - dy1 s

Forward schedule: one launch for queries and keys. A program owns (token, tile of heads of q then k). The
section of a pair is two comparisons with the channel, so the angle takes one gathered load of three positions
and no table.
Backward schedule: the forward with the sine's sign flipped; dq and dk come from one launch too and share the
angles, and a gradient that does not exist (a detached q, frozen k) has no heads in the grid. Positions are
all that is saved: the tables would be T D numbers a section.

op: mrope
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import math

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
def mrope_kernel(
    q_ptr, k_ptr, position_ptr, yq_ptr, yk_ptr, TOKENS, HQ, HK, HALF, END_T, END_H, log2_step,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pairs below END_T belong to time, below END_H to height, the others to width."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    section = (d >= END_T).to(tl.int32) + (d >= END_H).to(tl.int32)
    position = tl.load(position_ptr + section * TOKENS + token).to(tl.float32)
    angle = position * tl.exp2(-log2_step * d.to(tl.float32))
    c, s = tl.cos(angle)[None, :], SIGN * tl.sin(angle)[None, :]
    inside = (d < HALF)[None, :]
    q_offs = (token * HQ + h[:, None]) * (2 * HALF) + d[None, :]
    turn(q_ptr, yq_ptr, q_offs, (h < HQ)[:, None] & inside, HALF, c, s)
    k_offs = (token * HK + h[:, None] - HQ) * (2 * HALF) + d[None, :]
    turn(k_ptr, yk_ptr, k_offs, ((h >= HQ) & (h < HQ + HK))[:, None] & inside, HALF, c, s)


def rotate(q, k, position, sections, base, sign):
    (B, T, HQ, D), HK = q.shape, k.shape[2]
    HALF = D // 2
    yq, yk = torch.empty_like(q), torch.empty_like(k)
    mrope_kernel[(B * T, triton.cdiv(HQ + HK, 8))](
        q, k, position, yq, yk, B * T, HQ, HK, HALF, sections[0], sections[0] + sections[1],
        math.log2(base) / HALF, SIGN=sign, BLOCK_H=8, BLOCK_D=triton.next_power_of_2(HALF),
    )  # fmt: skip
    return yq, yk


@autodiff(inputs_require_grad=(0, 1))
def mrope(q, k, position, sections, base=10000.0):
    """q: (B, T, HQ, D); k: (B, T, HK, D); position: int64 (3, B, T); sections: three sizes, D / 2 in all."""
    (B, T, _, D), (HK, DK) = q.shape, k.shape[2:]
    if D % 2 or sum(sections) != D // 2:
        raise ValueError(f"head dimension {D} is not twice the sections {tuple(sections)}")
    if k.shape != (B, T, HK, DK) or DK != D or position.shape != (3, B, T):
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, position {tuple(position.shape)}")
    return rotate(q.contiguous(), k.contiguous(), position.contiguous(), sections, base, 1)


def reference(q, k, position, sections, base=10000.0):
    half = q.shape[-1] // 2
    section = torch.repeat_interleave(torch.arange(3), torch.tensor(sections)).to(q.device)
    frequency = base ** (-torch.arange(half, device=q.device, dtype=q.dtype) / half)
    angle = position[section].permute(1, 2, 0)[:, :, None, :].to(q.dtype) * frequency
    c, s = angle.cos(), angle.sin()

    def turned(x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)

    return turned(q), turned(k)


SWEEP = [
    {"B": 2, "T": 4096, "HQ": 28, "HK": 4, "D": 128},
    {"B": 1, "T": 1999, "HQ": 16, "HK": 2, "D": 80},
]
SWEEP_CPU = [{"B": 1, "T": 19, "HQ": 3, "HK": 2, "D": 32}, {"B": 2, "T": 5, "HQ": 7, "HK": 7, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    q = torch.randn(B, T, dims["HQ"], D, device=device, dtype=dtype)
    k = torch.randn(B, T, dims["HK"], D, device=device, dtype=dtype)
    step = torch.arange(T, device=device)
    position = torch.stack([step // 12, step // 4 % 3, step % 4])  # frames of three rows of four patches
    side = D // 2 * 3 // 8
    return q, k, position[:, None, :].expand(3, B, T), (D // 2 - 2 * side, side, side)


# ---- backward ----


class Mrope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, position, sections, base):
        position = position.contiguous()
        ctx.save_for_backward(position)
        ctx.options = sections, base
        return mrope(q, k, position, sections, base)

    @staticmethod
    def backward(ctx, dyq, dyk):
        (position,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            dyq = dyq[:, :, :0]
        if not ctx.needs_input_grad[1]:
            dyk = dyk[:, :, :0]
        dq, dk = rotate(dyq.contiguous(), dyk.contiguous(), position, *ctx.options, -1)
        needs = ctx.needs_input_grad
        return dq if needs[0] else None, dk if needs[1] else None, None, None, None


def mrope_autograd(q, k, position, sections, base=10000.0):
    return Mrope.apply(q, k, position, sections, base)

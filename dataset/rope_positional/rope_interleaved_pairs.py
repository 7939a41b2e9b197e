"""Rotary position on neighbouring channels, for the first R channels of each head, as in GPT-J.

Forward    pair i is (x_{2i}, x_{2i+1}); token t turns it by the angle a = t base^(-2i/R) for i < R / 2:
           y_{2i} = x_{2i} cos a - x_{2i+1} sin a,  y_{2i+1} = x_{2i+1} cos a + x_{2i} sin a;
           the channels from R on pass
Backward   every pair is turned by an orthogonal matrix (the identity is one), so the adjoint turns back:
           dx_{2i} = dy_{2i} cos a + dy_{2i+1} sin a,  dx_{2i+1} = dy_{2i+1} cos a - dy_{2i} sin a

Forward schedule: a program owns (token, tile of heads). Partners are neighbours in memory, so loading them
apart would read every second number, twice; the tile is loaded whole, split into evens and odds in registers,
turned, interleaved and stored whole. Channels that pass are pairs whose angle is 0: no second path, and a
last channel without a partner passes too.
Backward schedule: the forward with the sine's sign flipped. The angle depends on nothing but the place of a
number, so nothing at all is saved: no x, no table, no positions.

op: rope_interleaved
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
def rope_pairs_kernel(
    x_ptr, y_ptr, T, H, D, PAIRS, log2_step,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_D // 2)
    angle = (token % T).to(tl.float32) * tl.exp2(-log2_step * i.to(tl.float32))
    c = tl.where(i < PAIRS, tl.cos(angle), 1.0)[None, :]
    s = tl.where(i < PAIRS, SIGN * tl.sin(angle), 0.0)[None, :]
    offs = (token * H + h[:, None]) * D + d[None, :]
    mask = (h[:, None] < H) & (d[None, :] < D)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, [BLOCK_H, BLOCK_D // 2, 2]))
    y = tl.interleave(even * c - odd * s, odd * c + even * s)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def turn(x, R, base, sign):
    B, T, H, D = x.shape
    if R % 2 or not 0 <= R <= D:
        raise ValueError(f"{R} channels of {D} cannot be turned in pairs")
    y = torch.empty_like(x)
    rope_pairs_kernel[(B * T, triton.cdiv(H, 4))](
        x, y, T, H, D, R // 2, 2 * math.log2(base) / max(1, R),
        SIGN=sign, BLOCK_H=4, BLOCK_D=max(2, triton.next_power_of_2(D)),
    )  # fmt: skip
    return y


@autodiff(inputs_require_grad=(0,))
def rope_pairs(x, R, base=10000.0):
    """x: (B, T, H, D); R: even, the channels that turn."""
    return turn(x.contiguous(), R, base, 1)


def reference(x, R, base=10000.0):
    t = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    frequency = base ** (-2 * torch.arange(R // 2, device=x.device, dtype=x.dtype) / max(1, R))
    angle = (t[:, None] * frequency)[:, None, :]
    even, odd = x[..., 0:R:2], x[..., 1:R:2]
    c, s = angle.cos(), angle.sin()
    turned = torch.stack([even * c - odd * s, odd * c + even * s], dim=-1)
    return torch.cat([turned.flatten(-2), x[..., R:]], dim=-1)


SWEEP = [{"B": 4, "T": 2048, "H": 16, "D": 256}, {"B": 2, "T": 1999, "H": 12, "D": 100}]
SWEEP_CPU = [{"B": 2, "T": 17, "H": 2, "D": 24}, {"B": 1, "T": 9, "H": 5, "D": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    D = dims["D"]
    x = torch.randn(dims["B"], dims["T"], dims["H"], D, device=device, dtype=dtype)
    return x, D // 4 * 2


# ---- backward ----


class RopePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, R, base):
        ctx.options = R, base
        return rope_pairs(x, R, base)

    @staticmethod
    def backward(ctx, dy):
        return turn(dy.contiguous(), *ctx.options, -1), None, None


def rope_pairs_autograd(x, R, base=10000.0):
    return RopePairs.apply(x, R, base)

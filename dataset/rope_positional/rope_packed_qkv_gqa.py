"""Rotary position on a packed projection: queries and keys turn, values pass.

Forward    per token, heads [q_1 .. q_HQ, k_1 .. k_HK, v_1 .. v_HK] of one row of qkv;
           y1 = x1 c - x2 s,  y2 = x2 c + x1 s for the q and k heads,  y = x for the v heads
Backward   dx1 = dy1 c + dy2 s,  dx2 = dy2 c - dy1 s for q and k,  dx = dy for v

Forward schedule: a program owns (token, tile of heads) of the packed row. The angle is made from the position
and the channel, not read: exp2, cos and sin of D/2 numbers serve every head of the tile. A head that does not
turn is one whose cosine is 1 and sine 0, so q, k and v heads share one code path and one launch.
Backward schedule: the forward with the sine's sign flipped, and the packed gradient is written in one piece.
A backward by parts would make dq, dk and dv and concatenate them, which is a second pass over memory; here
every byte is read and written once. Nothing is saved but the positions.

op: rope_qkv
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
def rope_qkv_kernel(
    x_ptr, position_ptr, y_ptr, HEADS, TURNED, HALF, log2_step,
    SIGN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Heads from TURNED on pass; angle = position 2^(-d log2_step)."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    angle = tl.load(position_ptr + token).to(tl.float32) * tl.exp2(-log2_step * d.to(tl.float32))
    turned = h[:, None] < TURNED
    c = tl.where(turned, tl.cos(angle)[None, :], 1.0)
    s = tl.where(turned, SIGN * tl.sin(angle)[None, :], 0.0)
    offs = (token * HEADS + h[:, None]) * (2 * HALF) + d[None, :]
    mask = (h[:, None] < HEADS) & (d[None, :] < HALF)
    x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (x1 * c - x2 * s).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + offs + HALF, (x2 * c + x1 * s).to(y_ptr.dtype.element_ty), mask=mask)


def rotate(x, position, kv_heads, base, sign):
    B, T, heads, D = x.shape
    if D % 2:
        raise ValueError(f"head dimension {D} is odd and has no halves")
    if 2 * kv_heads > heads or position.shape != (B, T):
        raise ValueError(
            f"qkv {tuple(x.shape)}, positions {tuple(position.shape)} do not fit {kv_heads} kv heads"
        )
    y = torch.empty_like(x)
    HALF = D // 2
    rope_qkv_kernel[(B * T, triton.cdiv(heads, 8))](
        x, position, y, heads, heads - kv_heads, HALF, math.log2(base) / HALF,
        SIGN=sign, BLOCK_H=8, BLOCK_D=triton.next_power_of_2(HALF),
    )  # fmt: skip
    return y


@autodiff(inputs_require_grad=(0,))
def rope_qkv(qkv, position, kv_heads, base=10000.0):
    """qkv: (B, T, HQ + 2 kv_heads, D), D even; position: int64 (B, T)."""
    return rotate(qkv.contiguous(), position.contiguous(), kv_heads, base, 1)


def reference(qkv, position, kv_heads, base=10000.0):
    heads, D = qkv.shape[2:]
    frequency = base ** (-torch.arange(D // 2, device=qkv.device, dtype=qkv.dtype) / (D // 2))
    angle = position[:, :, None, None].to(qkv.dtype) * frequency
    x, v = qkv.split([heads - kv_heads, kv_heads], dim=2)
    x1, x2 = x.chunk(2, dim=-1)
    c, s = angle.cos(), angle.sin()
    return torch.cat([torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1), v], dim=2)


SWEEP = [
    {"B": 2, "T": 4096, "HQ": 32, "HK": 8, "D": 128},
    {"B": 3, "T": 1021, "HQ": 14, "HK": 2, "D": 64},
]
SWEEP_CPU = [{"B": 2, "T": 11, "HQ": 4, "HK": 2, "D": 16}, {"B": 1, "T": 7, "HQ": 9, "HK": 1, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T = dims["B"], dims["T"]
    qkv = torch.randn(B, T, dims["HQ"] + 2 * dims["HK"], dims["D"], device=device, dtype=dtype)
    position = torch.arange(T, device=device).expand(B, T) % 512  # documents of 512 tokens, packed
    return qkv, position, dims["HK"]


# ---- backward ----


class RopeQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, position, kv_heads, base):
        position = position.contiguous()
        ctx.save_for_backward(position)
        ctx.options = kv_heads, base
        return rope_qkv(qkv, position, kv_heads, base)

    @staticmethod
    def backward(ctx, dy):
        (position,) = ctx.saved_tensors
        return rotate(dy.contiguous(), position, *ctx.options, -1), None, None, None


def rope_qkv_autograd(qkv, position, kv_heads, base=10000.0):
    return RopeQkv.apply(qkv, position, kv_heads, base)

"""Rotary position embedding on half-split channels, with cosine and sine tables.

Forward    y1 = x1 c - x2 s,  y2 = x2 c + x1 s   with x = [x1; x2] and c, s the (T, D/2) tables
Backward   a rotation is orthogonal, its adjoint is the inverse rotation:
           dx1 = dy1 c + dy2 s,  dx2 = dy2 c - dy1 s

Forward schedule: a program owns (batch and token, tile of heads) and reads both halves of each head once.
Backward schedule: the forward kernel with the sign of s flipped. Nothing of x is saved, the tables are the
user's own, and the traffic is that of a copy.

op: rope_half
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    T,
    H,
    HALF,
    SIGN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    c = tl.load(cos_ptr + token % T * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    s = SIGN * tl.load(sin_ptr + token % T * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    offs = (token * H + h[:, None]) * (2 * HALF) + d[None, :]
    mask = (h[:, None] < H) & (d[None, :] < HALF)
    x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, x1 * c - x2 * s, mask=mask)
    tl.store(y_ptr + offs + HALF, x2 * c + x1 * s, mask=mask)


def rotate(x, cos, sin, sign):
    B, T, H, D = x.shape
    if D % 2:
        raise ValueError(f"head dimension {D} is odd and has no halves")
    y = torch.empty_like(x)
    BLOCK_D = triton.next_power_of_2(D // 2)
    rope_kernel[(B * T, triton.cdiv(H, 8))](
        x, cos, sin, y, T, H, D // 2, SIGN=sign, BLOCK_H=8, BLOCK_D=BLOCK_D
    )
    return y


@autodiff(inputs_require_grad=(0,))
def rope(x, cos, sin):
    """x: (B, T, H, D), D even; cos, sin: (T, D / 2)."""
    return rotate(x.contiguous(), cos.contiguous(), sin.contiguous(), 1)


def reference(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


SWEEP = [
    {"B": 2, "T": 4096, "H": 32, "D": 128},
    {"B": 4, "T": 2048, "H": 16, "D": 64},
    {"B": 3, "T": 2003, "H": 9, "D": 96},
]
SWEEP_CPU = [{"B": 2, "T": 13, "H": 3, "D": 32}, {"B": 1, "T": 5, "H": 9, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, H, D = dims["B"], dims["T"], dims["H"], dims["D"]
    x = torch.randn(B, T, H, D, device=device, dtype=dtype)
    frequency = 10000.0 ** (-torch.arange(D // 2, device=device) / max(1, D // 2))
    angle = torch.arange(T, device=device)[:, None] * frequency
    return x, angle.cos().to(dtype), angle.sin().to(dtype)


# ---- backward ----


class Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return rope(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return rotate(dy.contiguous(), cos, sin, -1), None, None


def rope_autograd(x, cos, sin):
    return Rope.apply(x, cos, sin)

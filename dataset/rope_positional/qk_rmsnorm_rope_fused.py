"""RMS norm of each head with a learned weight, then rotary position on its first channels.

Forward    r = 1 / sqrt(mean_d x_d^2 + eps),  n = r x,  y = R_t (w * n)
           (R_t rotates channel i with i + h by the angle of (t, i) for i < h; channels from 2h on pass)
Backward   dz = R_t^T dy, the inverse rotation;  with u = w * dz:
           dx = r (u - n mean_d(u n)),   dw = sum over tokens and heads of dz * n

Forward schedule: a program owns a token and a tile of its heads. The rotation wants channel d beside its
partner d +- h, so a head is read twice, the second time in the partner's order: the twin comes from cache,
and the tile needs no shuffle between lanes. r is not stored.
Backward schedule: the same owner of rows. dz needs the same two reads of dy; r is rebuilt from x, which has
to be read for dx anyway, so nothing but x is saved. dw sums over every row of the batch: a program walks a
group of tokens, keeps its sum in registers and stores one slot, and a second kernel adds the slots. With
groups the slots are few, and no two programs meet on the D addresses of dw.

op: qknorm_rope
schedule: row_reduce_correct, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


GROUP = 64  # rows (token, head) that one program of the backward walks


@triton.jit
def load_rotation(cos_ptr, sin_ptr, t, d, HALF):
    """Cosine and sine of every channel of rows t, the sine negative for a first half; 1 and 0 past 2 HALF."""
    turned = (d < 2 * HALF)[None, :]
    offs = t[:, None] * HALF + tl.where(d < HALF, d, d - HALF)[None, :]
    c = tl.load(cos_ptr + offs, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin_ptr + offs, mask=turned, other=0.0).to(tl.float32)
    return c, tl.where((d < HALF)[None, :], -s, s)


@triton.jit
def partner_of(d, HALF):
    return tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def norm_rope_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, y_ptr, ROWS, T, H, D, HALF, eps,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    p = partner_of(d, HALF)
    mask = (row[:, None] < ROWS) & (d[None, :] < D)
    x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    xp = tl.load(x_ptr + row[:, None] * D + p[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    wp = tl.load(w_ptr + p, mask=d < D, other=0.0).to(tl.float32)
    c, s = load_rotation(cos_ptr, sin_ptr, row // H % T, d, HALF)
    r = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    y = r * (x * w[None, :] * c + xp * wp[None, :] * s)
    tl.store(y_ptr + row[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def norm_rope(x, w, cos, sin, eps=1e-6):
    """x: (B, T, H, D); w: (D); cos, sin: (T, h) with 2h <= D."""
    B, T, H, D = x.shape
    HALF = cos.shape[1]
    if cos.shape != sin.shape or cos.shape[0] != T or 2 * HALF > D or w.shape[0] != D:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and tables {tuple(cos.shape)} do not fit")
    x, w, cos, sin = x.contiguous(), w.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    ROWS, BLOCK_D = B * T * H, triton.next_power_of_2(D)
    norm_rope_kernel[(triton.cdiv(ROWS, 16),)](
        x, w, cos, sin, y, ROWS, T, H, D, HALF, eps, BLOCK_R=16, BLOCK_D=BLOCK_D
    )
    return y


def reference(x, w, cos, sin, eps=1e-6):
    z = w * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    h = cos.shape[1]
    z1, z2, rest = z.split([h, h, z.shape[-1] - 2 * h], dim=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([z1 * c - z2 * s, z2 * c + z1 * s, rest], dim=-1)


SWEEP = [
    {"B": 2, "T": 4096, "H": 32, "D": 128, "R": 128},
    {"B": 1, "T": 2047, "H": 8, "D": 256, "R": 64},
]
SWEEP_CPU = [{"B": 2, "T": 14, "H": 3, "D": 32, "R": 16}, {"B": 1, "T": 9, "H": 5, "D": 20, "R": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, D, h = dims["T"], dims["D"], min(dims["R"], dims["D"]) // 2
    x = torch.randn(dims["B"], T, dims["H"], D, device=device, dtype=dtype)
    frequency = 10000.0 ** (-torch.arange(h, device=device) / max(1, h))
    angle = torch.arange(T, device=device)[:, None] * frequency
    return x, torch.randn(D, device=device, dtype=dtype), angle.cos().to(dtype), angle.sin().to(dtype)


# ---- backward ----


@triton.jit
def norm_rope_backward_kernel(
    x_ptr, w_ptr, cos_ptr, sin_ptr, dy_ptr, dx_ptr, dw_slots_ptr, ROWS, T, H, D, HALF, eps,
    GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    p = partner_of(d, HALF)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for start in range(0, GROUP, BLOCK_R):
        row = group * GROUP + start + tl.arange(0, BLOCK_R)
        mask = (row[:, None] < ROWS) & (d[None, :] < D)
        x = tl.load(x_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dyp = tl.load(dy_ptr + row[:, None] * D + p[None, :], mask=mask, other=0.0).to(tl.float32)
        c, s = load_rotation(cos_ptr, sin_ptr, row // H % T, d, HALF)
        dz = dy * c - dyp * s
        r = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        n = r * x
        u = w * dz
        dx = r * (u - n * (tl.sum(u * n, axis=1) / D)[:, None])
        tl.store(dx_ptr + row[:, None] * D + d[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dz * n
    tl.store(dw_slots_ptr + group * D + d, tl.sum(dw, axis=0), mask=d < D)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_S, BLOCK_D], dtype=tl.float32)
    for start in range(0, slots, BLOCK_S):
        i = start + tl.arange(0, BLOCK_S).to(tl.int64)
        mask = (i[:, None] < slots) & (d[None, :] < D)
        acc += tl.load(slots_ptr + i[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + d, tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty), mask=d < D)


class NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, cos, sin, eps):
        x, w, cos, sin = x.contiguous(), w.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, w, cos, sin)
        ctx.eps = eps
        return norm_rope(x, w, cos, sin, eps)

    @staticmethod
    def backward(ctx, dy):
        x, w, cos, sin = ctx.saved_tensors
        B, T, H, D = x.shape
        ROWS = B * T * H
        groups = triton.cdiv(ROWS, GROUP)
        dx = torch.empty_like(x)
        slots = torch.empty((groups, D), device=x.device, dtype=torch.float32)
        norm_rope_backward_kernel[(groups,)](
            x, w, cos, sin, dy.contiguous(), dx, slots, ROWS, T, H, D, cos.shape[1], ctx.eps,
            GROUP=GROUP, BLOCK_R=8, BLOCK_D=triton.next_power_of_2(D),
        )  # fmt: skip
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(D, 32),)](slots, dw, groups, D, BLOCK_S=32, BLOCK_D=32)
        return dx if ctx.needs_input_grad[0] else None, dw, None, None, None


def norm_rope_autograd(x, w, cos, sin, eps=1e-6):
    return NormRope.apply(x, w, cos, sin, eps)

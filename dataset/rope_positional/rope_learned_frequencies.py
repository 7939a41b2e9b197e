"""Rotary position embedding whose frequencies are learned, one per head and channel pair.

Forward    a = t theta_i;  y1 = x1 cos a - x2 sin a,  y2 = x2 cos a + x1 sin a
Backward   dx = inverse rotation of dy;  dy1/da = -y2,  dy2/da = y1, so
           dtheta_i = sum over batch and time of t (y1 dy2 - y2 dy1)

Forward schedule: a program owns (token tile, head); the angles are computed on the fly.
Backward schedule: the same ownership rebuilds sin, cos and y from x and writes dx. dtheta sums over all
tokens: each token tile stores one private row [H D / 2], and a second kernel adds the rows: no atomics, and
the partials are 2 / tile of x.

op: rope_learned
schedule: same_tile_pointwise, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def rope_kernel(x_ptr, theta_ptr, y_ptr, tokens, T, H, HALF, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    theta = tl.load(theta_ptr + head * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    angle = (token % T).to(tl.float32)[:, None] * theta[None, :]
    c, s = tl.cos(angle), tl.sin(angle)
    offs = (token[:, None] * H + head) * (2 * HALF) + d[None, :]
    mask = (token[:, None] < tokens) & (d[None, :] < HALF)
    x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, x1 * c - x2 * s, mask=mask)
    tl.store(y_ptr + offs + HALF, x2 * c + x1 * s, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def rope_learned(x, theta):
    """x: (B, T, H, D), D even; theta: (H, D / 2), best in float32: an angle is a step's number times it."""
    B, T, H, D = x.shape
    if D % 2:
        raise ValueError(f"head dimension {D} is odd and has no pairs")
    x = x.contiguous()
    y = torch.empty_like(x)
    BLOCK_D = triton.next_power_of_2(D // 2)
    grid = (triton.cdiv(B * T, 16), H)
    rope_kernel[grid](x, theta.contiguous(), y, B * T, T, H, D // 2, BLOCK_T=16, BLOCK_D=BLOCK_D)
    return y


def reference(x, theta):
    t = torch.arange(x.shape[1], device=x.device, dtype=theta.dtype)
    angle = t[:, None, None] * theta
    x1, x2 = x.chunk(2, dim=-1)
    c, s = angle.cos(), angle.sin()
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1).to(x.dtype)


SWEEP = [
    {"B": 2, "T": 4096, "H": 16, "D": 128},
    {"B": 8, "T": 1024, "H": 12, "D": 64},
    {"B": 3, "T": 2003, "H": 9, "D": 96},
]
SWEEP_CPU = [{"B": 2, "T": 37, "H": 2, "D": 16}, {"B": 1, "T": 9, "H": 3, "D": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["H"], dims["D"], device=device, dtype=dtype)
    return x, torch.rand(dims["H"], dims["D"] // 2, device=device)


# ---- backward ----


@triton.jit
def rope_backward_kernel(
    x_ptr,
    theta_ptr,
    dy_ptr,
    dx_ptr,
    part_ptr,
    tokens,
    T,
    H,
    HALF,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    theta = tl.load(theta_ptr + head * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    t = (token % T).to(tl.float32)[:, None]
    c, s = tl.cos(t * theta[None, :]), tl.sin(t * theta[None, :])
    offs = (token[:, None] * H + head) * (2 * HALF) + d[None, :]
    mask = (token[:, None] < tokens) & (d[None, :] < HALF)
    dy1 = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    dy2 = tl.load(dy_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offs, dy1 * c + dy2 * s, mask=mask)
    tl.store(dx_ptr + offs + HALF, dy2 * c - dy1 * s, mask=mask)
    x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
    dtheta = tl.sum(t * (y1 * dy2 - y2 * dy1), axis=0)
    tl.store(part_ptr + (tl.program_id(0) * H + head) * HALF + d, dtheta, mask=d < HALF)


@triton.jit
def column_sum_kernel(part_ptr, out_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        rows = start + tl.arange(0, BLOCK_G)
        mask = (rows[:, None] < G) & (cols[None, :] < N)
        total += tl.load(part_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < N)


class RopeLearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, theta):
        x, theta = x.contiguous(), theta.contiguous()
        ctx.save_for_backward(x, theta)
        return rope_learned(x, theta)

    @staticmethod
    def backward(ctx, dy):
        x, theta = ctx.saved_tensors
        dy = dy.contiguous()
        B, T, H, D = x.shape
        tiles = triton.cdiv(B * T, 16)
        dx, dtheta = torch.empty_like(x), torch.empty_like(theta)
        part = torch.empty((tiles, theta.numel()), device=x.device, dtype=torch.float32)
        BLOCK_D = triton.next_power_of_2(D // 2)
        rope_backward_kernel[(tiles, H)](
            x, theta, dy, dx, part, B * T, T, H, D // 2, BLOCK_T=16, BLOCK_D=BLOCK_D
        )
        N = theta.numel()
        column_sum_kernel[(triton.cdiv(N, 32),)](part, dtheta, tiles, N, BLOCK_G=32, BLOCK_N=32)
        return dx if ctx.needs_input_grad[0] else None, dtheta if ctx.needs_input_grad[1] else None


def rope_learned_autograd(x, theta):
    return RopeLearned.apply(x, theta)

"""Gated tanh unit of packed halves, conditioned by one vector a sequence (WaveNet, VITS, WaveGlow).

Forward    x (B, 2 C, T), h (B, 2 C):  a = x_c + h_c,  b = x_{C+c} + h_{C+c} at each time,
           y = tanh(a) s(b),  s the sigmoid
Backward   da = dy s(b) (1 - tanh(a)^2),  db = dy tanh(a) s(b) s(-b);  dx is (da, db) in x's places,
           and, as h is added at every time, dh_c = sum over t of da,  dh_{C+c} = sum over t of db

Forward schedule: a grid of (channel, time tile). Both halves are read where they lie; the sum x + h and the
two activations never exist in memory.
Backward schedule: the owner of a channel of a sequence walks its time: the two rows of x, dy, and the two of
dx pass once, and both sums of dh stay in registers to the end. One kernel, no partials and no atomics: B C
owners are thousands, and T is what a row has. 1 - tanh^2 and 1 - s are formed from exponentials that are at
most 1, so neither loses its digits where a gate is nearly closed.

op: gated_tanh
schedule: same_tile_pointwise, swap_owner
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def gates(a, b):
    """tanh(a) and its slope, s(b) and s(-b)."""
    e = tl.exp(tl.where(a < 0, 2 * a, -2 * a))  # a selection: abs(a) has no slope at 0
    size = (1 - e) / (1 + e)
    slope = 4 * e / ((1 + e) * (1 + e))
    return tl.where(a < 0, -size, size), slope, tl.sigmoid(b), tl.sigmoid(-b)


@triton.jit
def gated_tanh_kernel(x_ptr, h_ptr, y_ptr, C, T, BLOCK: tl.constexpr):
    channel = tl.program_id(0)  # n C + c
    half = channel // C * C + channel  # n 2 C + c
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, second = x_ptr + half.to(tl.int64) * T, x_ptr + (half + C).to(tl.int64) * T
    a = tl.load(first + t, mask=t < T, other=0.0).to(tl.float32) + tl.load(h_ptr + half).to(tl.float32)
    b = tl.load(second + t, mask=t < T, other=0.0).to(tl.float32) + tl.load(h_ptr + half + C).to(tl.float32)
    tanh_a, _, s, _ = gates(a, b)
    y = (tanh_a * s).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + channel.to(tl.int64) * T + t, y, mask=t < T)


@autodiff(inputs_require_grad=(0, 1))
def gated_tanh(x, h):
    """x: (B, 2 C, T); h: (B, 2 C); gives (B, C, T)."""
    B, both, T = x.shape
    if both % 2 or h.shape != (B, both):
        raise ValueError("x is (B, 2 C, T) and h (B, 2 C)")
    y = torch.empty((B, both // 2, T), device=x.device, dtype=x.dtype)
    BLOCK = min(1024, triton.next_power_of_2(T))
    gated_tanh_kernel[(B * both // 2, triton.cdiv(T, BLOCK))](
        x.contiguous(), h.contiguous(), y, both // 2, T, BLOCK=BLOCK
    )
    return y


def reference(x, h):
    a, b = (x + h[:, :, None]).chunk(2, dim=1)
    return torch.tanh(a) * torch.sigmoid(b)


SWEEP = [{"B": 16, "C": 192, "T": 8192}, {"B": 3, "C": 257, "T": 16001}]
SWEEP_CPU = [{"B": 2, "C": 6, "T": 45}, {"B": 1, "C": 2, "T": 1030}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, C, T = dims["B"], dims["C"], dims["T"]
    x = torch.randn(B, 2 * C, T, device=device, dtype=dtype)
    return x, torch.randn(B, 2 * C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def gated_tanh_backward_kernel(x_ptr, h_ptr, dy_ptr, dx_ptr, dh_ptr, C, T, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    half = channel // C * C + channel
    h_a = tl.load(h_ptr + half).to(tl.float32)
    h_b = tl.load(h_ptr + half + C).to(tl.float32)
    first, second = half.to(tl.int64) * T, (half + C).to(tl.int64) * T
    sum_a = tl.zeros([BLOCK], dtype=tl.float32)
    sum_b = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        a = tl.load(x_ptr + first + t, mask=t < T, other=0.0).to(tl.float32) + h_a
        b = tl.load(x_ptr + second + t, mask=t < T, other=0.0).to(tl.float32) + h_b
        dy = tl.load(dy_ptr + channel.to(tl.int64) * T + t, mask=t < T, other=0.0).to(tl.float32)
        tanh_a, slope, s, rest = gates(a, b)
        da = dy * s * slope
        db = dy * tanh_a * s * rest
        tl.store(dx_ptr + first + t, da.to(dx_ptr.dtype.element_ty), mask=t < T)
        tl.store(dx_ptr + second + t, db.to(dx_ptr.dtype.element_ty), mask=t < T)
        sum_a += da
        sum_b += db
    tl.store(dh_ptr + half, tl.sum(sum_a, axis=0).to(dh_ptr.dtype.element_ty))
    tl.store(dh_ptr + half + C, tl.sum(sum_b, axis=0).to(dh_ptr.dtype.element_ty))


class GatedTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, h):
        x, h = x.contiguous(), h.contiguous()
        ctx.save_for_backward(x, h)
        return gated_tanh(x, h)

    @staticmethod
    def backward(ctx, dy):
        x, h = ctx.saved_tensors
        B, both, T = x.shape
        dx, dh = torch.empty_like(x), torch.empty_like(h)
        BLOCK = min(1024, triton.next_power_of_2(T))
        gated_tanh_backward_kernel[(B * both // 2,)](x, h, dy.contiguous(), dx, dh, both // 2, T, BLOCK=BLOCK)
        return dx if ctx.needs_input_grad[0] else None, dh if ctx.needs_input_grad[1] else None


def gated_tanh_autograd(x, h):
    return GatedTanh.apply(x, h)

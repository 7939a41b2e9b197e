"""Clamped SwiGLU of interleaved pairs: the gate and the value of a column lie next to each other.

Forward    x = (g_0, u_0, g_1, u_1, ...),  g' = min(g, L),  u' = clamp(u, -L, L),
           y = g' s (u' + 1),  s = sigmoid(k g')
Backward   dg = dy (u' + 1) s (1 + k g' (1 - s)) [g < L],  du = dy g' s [-L < u < L]

Forward schedule: a program owns (row, column tile of y), reads the 2 BLOCK numbers of its pairs as one
contiguous vector and splits them in registers.
Backward schedule: the same tiles, the same read, and one contiguous write: dg and du are joined to pairs in
registers before they are stored. Reading every second number twice would use half of each memory sector each
time, and so would two strided stores. The clamps leave nothing to save: which side of L a number was on
is seen from x again, and so is the sigmoid.

op: swiglu_clamped
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
def load_pairs(x_ptr, row, F, BLOCK: tl.constexpr):
    """The numbers g and u of a tile of pairs, and where they are."""
    i = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    x = tl.load(x_ptr + row * 2 * F + i, mask=i < 2 * F, other=0.0).to(tl.float32)
    g, u = tl.split(tl.reshape(x, (BLOCK, 2)))
    return g, u, i


@triton.jit
def swiglu_clamped_kernel(x_ptr, y_ptr, F, k, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g, u, _ = load_pairs(x_ptr, row, F, BLOCK)
    g = tl.minimum(g, limit)
    u = tl.minimum(tl.maximum(u, -limit), limit)
    y = g * tl.sigmoid(k * g) * (u + 1)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * F + cols, y.to(y_ptr.dtype.element_ty), mask=cols < F)


@autodiff(inputs_require_grad=(0,))
def swiglu_clamped(x, k=1.702, limit=7.0):
    """x: (..., 2 F), pairs of a gate and a value; gives (..., F)."""
    x = x.contiguous()
    if x.shape[-1] % 2:
        raise ValueError(f"{x.shape[-1]} columns are not pairs")
    F = x.shape[-1] // 2
    y = torch.empty((*x.shape[:-1], F), device=x.device, dtype=x.dtype)
    swiglu_clamped_kernel[(x.numel() // (2 * F), triton.cdiv(F, 512))](x, y, F, k, limit, BLOCK=512)
    return y


def reference(x, k=1.702, limit=7.0):
    g, u = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return g * torch.sigmoid(k * g) * (u + 1)


SWEEP = [{"M": 8192, "F": 2880}, {"M": 4099, "F": 1001}]
SWEEP_CPU = [{"M": 29, "F": 51}, {"M": 2, "F": 700}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """The limit is no number of a short dtype: where x equals it the slope is a matter of taste. As a float32
    it is a little more than 5.01, so that the few numbers that equal it are beyond it in float64."""
    return 4 * torch.randn(dims["M"], 2 * dims["F"], device=device, dtype=dtype), 1.702, 5.01


# ---- backward ----


@triton.jit
def swiglu_clamped_backward_kernel(x_ptr, dy_ptr, dx_ptr, F, k, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g_raw, u_raw, i = load_pairs(x_ptr, row, F, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + row * F + cols, mask=cols < F, other=0.0).to(tl.float32)
    g = tl.minimum(g_raw, limit)
    u = tl.minimum(tl.maximum(u_raw, -limit), limit)
    s = tl.sigmoid(k * g)
    dg = tl.where(g_raw < limit, dy * (u + 1) * s * (1 + k * g * (1 - s)), 0.0)
    du = tl.where(tl.abs(u_raw) < limit, dy * g * s, 0.0)
    dx = tl.interleave(dg, du)
    tl.store(dx_ptr + row * 2 * F + i, dx.to(dx_ptr.dtype.element_ty), mask=i < 2 * F)


class SwiGLUClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, limit):
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.constants = k, limit
        return swiglu_clamped(x, k, limit)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        F = x.shape[-1] // 2
        dx = torch.empty_like(x)
        grid = (x.numel() // (2 * F), triton.cdiv(F, 512))
        swiglu_clamped_backward_kernel[grid](x, dy.contiguous(), dx, F, *ctx.constants, BLOCK=512)
        return dx, None, None


def swiglu_clamped_autograd(x, k=1.702, limit=7.0):
    return SwiGLUClamped.apply(x, k, limit)

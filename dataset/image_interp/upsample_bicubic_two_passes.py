"""Bicubic resizing, an axis at a time.

Forward    along an axis from n to m pixels, output o reads at u = (o + 1/2) n / m - 1/2; i = floor(u),
           f = u - i:  y_o = sum over k = -1..2 of c(|f - k|) x at clamp(i + k, 0, n - 1), c the cubic with
           slope -3/4 at distance 1; first along the rows, then along the columns
Backward   dx_j = sum over the o and k with clamp(i + k) = j of c(|f - k|) dy_o;  first along the columns,
           then along the rows

Forward schedule: one kernel sees a tensor as (outer, axis, inner) and serves both passes; a program owns a
flat tile of outputs. Two passes of 4 taps, with the picture between them in float32, are 8 reads where 4 x 4
taps at once are 16. Positions are whole numbers of 1 / 2m, so that no rounding moves a pixel.
Backward schedule: the transposed passes in reversed order, again one kernel. The owner of an input gathers:
as u does not decrease, its outputs are those with j - 2 <= u < j + 2, an interval of at most 4 m / n + 1;
each lane starts at the first of its interval and walks as far as any lane needs. An output at the border
reads its pixel by several taps, so the weight of (o, j) is the sum over the taps that end on j after
clamping: 0 for o past the interval, which needs no other end. No atomics, no zero fill.

op: upsample_bicubic
schedule: gather_transpose
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def near(d):
    """The cubic for distances up to 1."""
    return (1.25 * d - 2.25) * d * d + 1


@triton.jit
def far(d):
    """The cubic for distances from 1 to 2."""
    return ((-0.75 * d + 3.75) * d - 6) * d + 3


@triton.jit
def place(o, n, m):
    """i and f of output o."""
    t = (2 * o + 1) * n + m  # 2 m (u + 1), not negative
    i = t // (2 * m) - 1
    return i, (t - (i + 1) * 2 * m).to(tl.float32) / (2 * m)


@triton.jit
def tap(x_ptr, i, n, inner, mask):
    i = tl.minimum(tl.maximum(i, 0), n - 1)
    return tl.load(x_ptr + i * inner, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def resize_kernel(x_ptr, y_ptr, count, n, m, inner, BLOCK: tl.constexpr):
    """(outer, m, inner) from (outer, n, inner); count: of all outputs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    i, f = place((at // inner % m).to(tl.int32), n, m)
    x_ptr += at // (inner * m) * n * inner + at % inner
    y = far(1 + f) * tap(x_ptr, i - 1, n, inner, mask) + near(f) * tap(x_ptr, i, n, inner, mask)
    y += near(1 - f) * tap(x_ptr, i + 1, n, inner, mask) + far(2 - f) * tap(x_ptr, i + 2, n, inner, mask)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


def resize(x, y, n, m, inner):
    resize_kernel[(triton.cdiv(y.numel(), BLOCK),)](x, y, y.numel(), n, m, inner, BLOCK=BLOCK)
    return y


@autodiff(inputs_require_grad=(0,))
def upsample_bicubic(x, height, width):
    """x: (N, C, H, W); gives (N, C, height, width)."""
    N, C, H, W = x.shape
    if min(H, W, height, width) < 1:
        raise ValueError(f"from {H} x {W} to {height} x {width}")
    wide = torch.empty((N, C, H, width), device=x.device, dtype=torch.float32)
    y = torch.empty((N, C, height, width), device=x.device, dtype=x.dtype)
    return resize(resize(x.contiguous(), wide, W, width, 1), y, H, height, width)


def reference(x, height, width):
    size = (height, width)
    return torch.nn.functional.interpolate(x, size=size, mode="bicubic", align_corners=False)


SWEEP = [
    {"N": 16, "C": 64, "H": 64, "W": 64, "height": 128, "width": 128},
    {"N": 3, "C": 3, "H": 517, "W": 301, "height": 224, "width": 333},
]
SWEEP_CPU = [
    {"N": 2, "C": 2, "H": 7, "W": 5, "height": 11, "width": 9},
    {"N": 1, "C": 3, "H": 12, "W": 6, "height": 5, "width": 21},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(*(dims[name] for name in "NCHW"), device=device, dtype=dtype)
    return x, dims["height"], dims["width"]


# ---- backward ----


@triton.jit
def share(i, j, n, weight):
    """The weight of a tap at i, where clamping takes it to j."""
    return tl.where(tl.minimum(tl.maximum(i, 0), n - 1) == j, weight, 0.0)


@triton.jit
def resize_backward_kernel(dy_ptr, dx_ptr, count, n, m, inner, steps, BLOCK: tl.constexpr):
    """(outer, n, inner) from (outer, m, inner); count: of all inputs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    j = (at // inner % n).to(tl.int32)
    dy_ptr += at // (inner * n) * m * inner + at % inner
    # the first o with (2 o + 1) n - m >= 2 m (j - 2)
    first = (tl.maximum(m * (2 * j - 3) - n, 0) + 2 * n - 1) // (2 * n)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(steps):
        o = first + step
        i, f = place(o, n, m)
        weight = share(i - 1, j, n, far(1 + f)) + share(i, j, n, near(f))
        weight += share(i + 1, j, n, near(1 - f)) + share(i + 2, j, n, far(2 - f))
        dy = tl.load(dy_ptr + o.to(tl.int64) * inner, mask=(at < count) & (o < m), other=0.0)
        dx += weight * dy.to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < count)


def resize_backward(dy, dx, n, m, inner):
    grid, steps = (triton.cdiv(dx.numel(), BLOCK),), 4 * m // n + 2
    resize_backward_kernel[grid](dy, dx, dx.numel(), n, m, inner, steps, BLOCK=BLOCK)
    return dx


class UpsampleBicubic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, height, width):
        ctx.size = x.shape
        return upsample_bicubic(x, height, width)

    @staticmethod
    def backward(ctx, dy):
        (N, C, H, W), (height, width) = ctx.size, dy.shape[2:]
        wide = torch.empty((N, C, H, width), device=dy.device, dtype=torch.float32)
        dx = torch.empty((N, C, H, W), device=dy.device, dtype=dy.dtype)
        resize_backward(dy.contiguous(), wide, H, height, width)
        return resize_backward(wide, dx, W, width, 1), None, None


def upsample_bicubic_autograd(x, height, width):
    return UpsampleBicubic.apply(x, height, width)

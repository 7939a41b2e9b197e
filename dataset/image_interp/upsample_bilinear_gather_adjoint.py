"""Bilinear resizing to any size, pixels taken at their centres.

Forward    an output at o reads the input at u = clamp((o + 1/2) n / m - 1/2, 0, n - 1), n inputs to m
           outputs along an axis, and input i has the weight max(0, 1 - |u - i|) there;
           y[O, P] = sum_ij wy(O, i) wx(P, j) x[i, j]
Backward   dx[i, j] = sum over the (O, P) with wy(O, i) wx(P, j) > 0 of wy(O, i) wx(P, j) dy[O, P]

Forward schedule: a program owns a flat tile of outputs and reads four inputs for each. Positions are whole
numbers of 1 / 2m: u = t / 2m, t = clamp((2 o + 1) n - m, 0, 2 m (n - 1)), so that no rounding moves a pixel.
Backward schedule: the map o -> u does not decrease, so the outputs that touch input i are an interval: those
with 2 m (i - 1) < (2 o + 1) n - m < 2 m (i + 1), at most 2 m / n + 1 of them; clamping only gives the
outermost inputs what lies beyond the border. A program owns a flat tile of inputs, starts each lane at the
first output of its interval, and walks a rectangle of outputs of one size for all lanes; the weight formula
is zero outside the interval, so it needs no mask for its end. Each dx is summed in a register and stored
once, with no atomics and no zero fill, for enlarging and shrinking alike.

op: upsample_bilinear
schedule: gather_transpose
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def position(o, n, m):
    """Where output o of m reads among n inputs, in units of 1 / 2m."""
    return tl.minimum(tl.maximum((2 * o + 1) * n - m, 0), 2 * m * (n - 1))


@triton.jit
def resize_kernel(x_ptr, y_ptr, n_out, H, W, OH, OW, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = k < n_out
    plane = x_ptr + k // (OH * OW) * H * W
    ty = position(k // OW % OH, H, OH)
    tx = position(k % OW, W, OW)
    i0 = ty // (2 * OH)
    j0 = tx // (2 * OW)
    i1 = tl.minimum(i0 + 1, H - 1)
    j1 = tl.minimum(j0 + 1, W - 1)
    wy = (ty % (2 * OH)).to(tl.float32) / (2 * OH)
    wx = (tx % (2 * OW)).to(tl.float32) / (2 * OW)
    x00 = tl.load(plane + i0 * W + j0, mask=mask, other=0.0).to(tl.float32)
    x01 = tl.load(plane + i0 * W + j1, mask=mask, other=0.0).to(tl.float32)
    x10 = tl.load(plane + i1 * W + j0, mask=mask, other=0.0).to(tl.float32)
    x11 = tl.load(plane + i1 * W + j1, mask=mask, other=0.0).to(tl.float32)
    y = (1 - wy) * ((1 - wx) * x00 + wx * x01) + wy * ((1 - wx) * x10 + wx * x11)
    tl.store(y_ptr + k, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0,))
def resize_bilinear(x, OH, OW):
    """x: (N, C, H, W); gives (N, C, OH, OW)."""
    x = x.contiguous()
    N, C, H, W = x.shape
    y = torch.empty((N, C, OH, OW), device=x.device, dtype=x.dtype)
    resize_kernel[(triton.cdiv(y.numel(), 512),)](x, y, y.numel(), H, W, OH, OW, BLOCK=512)
    return y


def reference(x, OH, OW):
    return torch.nn.functional.interpolate(x, size=(OH, OW), mode="bilinear", align_corners=False)


SWEEP = [
    {"N": 4, "C": 256, "H": 64, "W": 64, "OH": 128, "OW": 128},
    {"N": 8, "C": 19, "H": 129, "W": 257, "OH": 300, "OW": 511},
]
SWEEP_CPU = [
    {"N": 1, "C": 3, "H": 6, "W": 7, "OH": 13, "OW": 17},
    {"N": 2, "C": 2, "H": 12, "W": 9, "OH": 5, "OW": 9},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["C"], dims["H"], dims["W"], device=device, dtype=dtype)
    return x, dims["OH"], dims["OW"]


# ---- backward ----


@triton.jit
def first_output(i, n, m):
    """The first output of m that input i of n has a weight in."""
    before = 2 * m * (i - 1) + m - n  # 2 n o > before
    return tl.where(before < 0, 0, tl.maximum(before, 0) // (2 * n) + 1)


@triton.jit
def weight(o, i, n, m):
    away = tl.abs(position(o, n, m) - 2 * m * i)
    w = 1 - away.to(tl.float32) / (2 * m)
    return tl.where(o < m, tl.maximum(w, 0.0), 0.0)


@triton.jit
def resize_backward_kernel(
    dy_ptr, dx_ptr, n_in, H, W, OH, OW, reach_y, reach_x, BLOCK: tl.constexpr
):  # fmt: skip
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = dy_ptr + k // (H * W) * OH * OW
    i = k // W % H
    j = k % W
    first_y = first_output(i, H, OH)
    first_x = first_output(j, W, OW)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for dy_step in range(reach_y):
        oy = first_y + dy_step
        wy = weight(oy, i, H, OH)
        for dx_step in range(reach_x):
            ox = first_x + dx_step
            w = wy * weight(ox, j, W, OW)
            mask = (k < n_in) & (oy < OH) & (ox < OW)
            dx += w * tl.load(plane + oy * OW + ox, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + k, dx.to(dx_ptr.dtype.element_ty), mask=k < n_in)


class ResizeBilinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, OH, OW):
        ctx.x_shape = x.shape
        return resize_bilinear(x, OH, OW)

    @staticmethod
    def backward(ctx, dy):
        (_, _, H, W), (OH, OW) = ctx.x_shape, dy.shape[2:]
        dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
        reach_y, reach_x = 2 * OH // H + 1, 2 * OW // W + 1
        resize_backward_kernel[(triton.cdiv(dx.numel(), 256),)](
            dy.contiguous(), dx, dx.numel(), H, W, OH, OW, reach_y, reach_x, BLOCK=256
        )
        return dx, None, None


def resize_bilinear_autograd(x, OH, OW):
    return ResizeBilinear.apply(x, OH, OW)

"""Strided 2D convolution, channels last, whose input gradient is split by position modulo the stride.

Forward    y[o, k] = sum over taps (r, t) and channels c of x[s o + (r, t) - pad, c] w[r, t, c, k]
Backward   dx[i, c] = sum over k and the taps with (i + pad - (r, t)) divisible by s of
           dy[(i + pad - (r, t)) / s, k] w[r, t, c, k];
           dw[r, t, c, k] = sum over o of x[s o + (r, t) - pad, c] dy[o, k].
           Let i = s u + i0 with 0 <= i0 < s, and a = (i0 + pad) mod s, a coordinate at a time. The taps that
           divide are r = a, a + s, a + 2 s, .., and the output is u + (i0 + pad - r) / s

Forward schedule: a program owns (tile of output pixels, tile of k) and walks taps and channels; patches are
gathered on load.
Backward schedule: pixels with the same i0, a parity class for stride 2, see the same taps, and their outputs
lie side by side: for each of the s^2 classes dx is a dense convolution of stride 1 by a subset of the taps. A
program owns a tile of one class and walks its taps alone. A tile of neighbouring pixels would walk all R^2
taps for each and mask most of them away: all but one in s^2 lanes of a dot would be zeros. The classes share
the taps between them, so all programs together do as many products as the forward. dw has few tiles and many
pixels: the pixels are split, each part stores its own dw, and a second kernel adds the parts in order.

op: conv2d
schedule: gather_transpose, partials_then_reduce
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def patch_pixels(p, pixels, r, t, Y, X, OY, OX, stride, pad):
    """The input pixel that tap (r, t) of output pixel p reads, and whether there is one."""
    y, x = p // OX % OY * stride + r - pad, p % OX * stride + t - pad
    inside = (p < pixels) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
    return (p // (OY * OX) * Y + y) * X + x, inside


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, y_ptr, pixels, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        i, inside = patch_pixels(p, pixels, tap // R, tap % R, Y, X, OY, OX, stride, pad)
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            w = load_tile(w_ptr, tap * C + c, k, c < C, K)
            acc = tl.dot(load_tile(x_ptr, i, c, inside, C), w, acc, input_precision=PRECISION)
    store_tile(y_ptr, acc, p, k, p < pixels, K)


@autodiff(inputs_require_grad=(0, 1))
def strided_conv2d(x, w, stride):
    """x: (N, Y, X, C); w: (R, R, C, K), padded by R // 2 on every side."""
    if w.shape[0] != w.shape[1] or w.shape[2] != x.shape[3] or stride < 1:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and stride {stride} do not fit")
    x, w = x.contiguous(), w.contiguous()
    (N, Y, X, C), R, K, tiles = x.shape, w.shape[0], w.shape[3], tiling(x)
    OY, OX = ((size + 2 * (R // 2) - R) // stride + 1 for size in (Y, X))
    y = torch.empty((N, OY, OX, K), device=x.device, dtype=x.dtype)
    pixels = N * OY * OX
    conv_kernel[(triton.cdiv(pixels, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))](
        x, w, y, pixels, Y, X, C, OY, OX, K, R, stride, R // 2, **tiles
    )
    return y


def reference(x, w, stride):
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(3, 2, 0, 1).contiguous()
    return torch.nn.functional.conv2d(x, w, None, stride, w.shape[2] // 2).permute(0, 2, 3, 1)


SWEEP = [
    {"N": 16, "Y": 56, "X": 56, "C": 128, "K": 256, "R": 3, "s": 2},
    {"N": 8, "Y": 225, "X": 193, "C": 3, "K": 64, "R": 7, "s": 4},
]
SWEEP_CPU = [
    {"N": 1, "Y": 11, "X": 14, "C": 16, "K": 20, "R": 3, "s": 2},
    {"N": 2, "Y": 7, "X": 5, "C": 5, "K": 37, "R": 5, "s": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, Y, X, C, K, R = (dims[key] for key in ("N", "Y", "X", "C", "K", "R"))
    x = torch.randn(N, Y, X, C, device=device, dtype=dtype)
    w = torch.randn(R, R, C, K, device=device, dtype=dtype) / max(1, R * R * C) ** 0.5
    return x, w, dims["s"]


# ---- backward ----


@triton.jit
def input_kernel(
    dy_ptr, w_ptr, dx_ptr, N, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of a tile of the class of pixels (y0 + stride u, x0 + stride v)."""
    y0, x0 = tl.program_id(2) // stride, tl.program_id(2) % stride
    U, V = (Y - y0 + stride - 1) // stride, (X - x0 + stride - 1) // stride
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = p < N * U * V
    V = tl.maximum(V, 1)  # an empty class of a stride above the width
    n, u, v = p // tl.maximum(U * V, 1), p // V % tl.maximum(U, 1), p % V
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_r, first_t = (y0 + pad) % stride, (x0 + pad) % stride
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for r in range(first_r, R, stride):
        oy = u + (y0 + pad - r + R * stride) // stride - R  # a multiple of stride, kept above 0
        for t in range(first_t, R, stride):
            ox = v + (x0 + pad - t + R * stride) // stride - R
            seen = inside & (oy >= 0) & (oy < OY) & (ox >= 0) & (ox < OX)
            for start in range(0, K, BLOCK):
                k = start + tl.arange(0, BLOCK)
                dy = load_tile(dy_ptr, (n * OY + oy) * OX + ox, k, seen, K)
                w = load_tile(w_ptr, (r * R + t) * C + c, k, c < C, K)
                acc = tl.dot(dy, tl.trans(w), acc, input_precision=PRECISION)
    pixel = (n * Y + y0 + u * stride) * X + x0 + v * stride
    store_tile(dx_ptr, acc, pixel, c, inside, C)


@triton.jit
def weight_slot_kernel(
    x_ptr, dy_ptr, slots_ptr, pixels, part, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw of a tap from one part of the output pixels."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap, slot = tl.program_id(2) % (R * R), (tl.program_id(2) // (R * R)).to(tl.int64)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, pixels), BLOCK):
        p = start + tl.arange(0, BLOCK)
        i, inside = patch_pixels(p, pixels, tap // R, tap % R, Y, X, OY, OX, stride, pad)
        x = load_tile(x_ptr, i, c, inside, C)
        dy = load_tile(dy_ptr, p, k, p < pixels, K)
        acc = tl.dot(tl.trans(x), dy, acc, input_precision=PRECISION)
    store_tile(slots_ptr + (slot * R * R + tap) * C * K, acc, c, k, c < C, K)


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    slot_ptrs = slots_ptr + i
    for _ in range(slots):
        dw += tl.load(slot_ptrs, mask=i < size, other=0.0)
        slot_ptrs += size
    tl.store(dw_ptr + i, dw.to(dw_ptr.dtype.element_ty), mask=i < size)


class StridedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, stride):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride = stride
        return strided_conv2d(x, w, stride)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        (N, Y, X, C), (_, OY, OX, K), R, stride = x.shape, dy.shape, w.shape[0], ctx.stride
        tiles = tiling(x)
        BLOCK, sizes = tiles["BLOCK"], (Y, X, C, OY, OX, K, R, stride, R // 2)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            largest = N * triton.cdiv(Y, stride) * triton.cdiv(X, stride)  # of the classes
            grid = (triton.cdiv(largest, BLOCK), triton.cdiv(C, BLOCK), stride * stride)
            input_kernel[grid](dy, w, dx, N, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            pixels, grid = N * OY * OX, (triton.cdiv(C, BLOCK), triton.cdiv(K, BLOCK))
            wanted = triton.cdiv(1024, max(1, grid[0] * grid[1] * R * R))  # parts, to fill a GPU
            part = triton.cdiv(max(pixels, 1), wanted * BLOCK) * BLOCK
            count = triton.cdiv(pixels, part)
            slots = torch.empty((count, *w.shape), device=x.device, dtype=torch.float32)
            weight_slot_kernel[(*grid, R * R * count)](x, dy, slots, pixels, part, *sizes, **tiles)
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(w.numel(), 256),)](slots, dw, count, w.numel(), BLOCK=256)
        return dx, dw, None


def strided_conv2d_autograd(x, w, stride):
    return StridedConv2d.apply(x, w, stride)

"""Transposed 2D convolution, channels last, gathered in both directions.

Forward    y[o, k] = sum over c and the taps r with (o + pad - r) divisible by s of
           x[(o + pad - r) / s, c] w[r, c, k];  o, r and i are pairs of coordinates
Backward   i = (o + pad - r) / s is o = s i + r - pad, and every such o inside the output read x[i]:
           dx[i, c] = sum over r and k of dy[s i + r - pad, k] w[r, c, k],
           dw[r, c, k] = sum over i of x[i, c] dy[s i + r - pad, k]

Forward schedule: the definition scatters each x into R^2 outputs. Here a program owns a tile of outputs
that are equal modulo s and so see the same taps: it walks those taps and channels, and stores once.
Backward schedule: the difficulty is all in the forward. The adjoint of the scatter is a gather at stride s,
so dx is an ordinary strided convolution of dy with every lane of every dot in use, and nothing has classes.
dw needs the same patches of dy against x: its sum runs over input pixels, s^2 times fewer than outputs, in
parts, because R^2 C K numbers are few tiles; each part has a slot, and a last kernel adds them in order.

op: conv_transpose2d
schedule: gather_transpose, partials_then_reduce
difficulty: 4
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


def sizes_of(x, w, stride):
    """Y, X, C, OY, OX, K, R, stride, pad: what all kernels are told."""
    (Y, X, C), (R, K) = x.shape[1:], w.shape[1::2]
    if w.shape[:3] != (R, R, C) or stride < 1:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and stride {stride} do not fit")
    pad = max(0, R - stride) // 2
    return Y, X, C, (Y - 1) * stride + R - 2 * pad, (X - 1) * stride + R - 2 * pad, K, R, stride, pad


@triton.jit
def load_tile(ptr, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, inside, C):
    mask = inside[:, None] & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_transpose_kernel(
    x_ptr, w_ptr, y_ptr, N, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the outputs (y0 + stride u, x0 + stride v)."""
    y0, x0 = tl.program_id(2) // stride, tl.program_id(2) % stride
    U, V = (OY - y0 + stride - 1) // stride, (OX - x0 + stride - 1) // stride
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = p < N * U * V
    V = tl.maximum(V, 1)  # a class may be empty
    n, u, v = p // tl.maximum(U * V, 1), p // V % tl.maximum(U, 1), p % V
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for r in range((y0 + pad) % stride, R, stride):
        iy = u + (y0 + pad - r + R * stride) // stride - R  # a multiple of stride, kept above 0
        for t in range((x0 + pad) % stride, R, stride):
            ix = v + (x0 + pad - t + R * stride) // stride - R
            seen = inside & (iy >= 0) & (iy < Y) & (ix >= 0) & (ix < X)
            for start in range(0, C, BLOCK):
                c = start + tl.arange(0, BLOCK)
                x = load_tile(x_ptr, (n * Y + iy) * X + ix, c, seen, C)
                w = load_tile(w_ptr, (r * R + t) * C + c, k, c < C, K)
                acc = tl.dot(x, w, acc, input_precision=PRECISION)
    store_tile(y_ptr, acc, (n * OY + y0 + u * stride) * OX + x0 + v * stride, k, inside, K)


@autodiff(inputs_require_grad=(0, 1))
def conv_transpose2d(x, w, stride):
    """x: (N, Y, X, C); w: (R, R, C, K); the output is cut by (R - stride) // 2 on every side: stride times
    as large as x where R - stride is even.
    """
    sizes, N, tiles = sizes_of(x, w, stride), x.shape[0], tiling(x)
    OY, OX, K = sizes[3:6]
    y = torch.empty((N, OY, OX, K), device=x.device, dtype=x.dtype)
    largest = N * triton.cdiv(OY, stride) * triton.cdiv(OX, stride)  # of the classes
    grid = (triton.cdiv(largest, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]), stride * stride)
    conv_transpose_kernel[grid](x.contiguous(), w.contiguous(), y, N, *sizes, **tiles)
    return y


def reference(x, w, stride):
    x, w, pad = x.permute(0, 3, 1, 2), w.permute(2, 3, 0, 1), max(0, w.shape[0] - stride) // 2
    y = torch.nn.functional.conv_transpose2d(x.contiguous(), w.contiguous(), None, stride, pad)
    return y.permute(0, 2, 3, 1)


SWEEP = [
    {"N": 16, "Y": 64, "X": 64, "C": 256, "K": 128, "R": 4, "s": 2},
    {"N": 8, "Y": 61, "X": 45, "C": 192, "K": 100, "R": 5, "s": 3},
]
SWEEP_CPU = [
    {"N": 2, "Y": 6, "X": 5, "C": 16, "K": 20, "R": 4, "s": 2},
    {"N": 1, "Y": 7, "X": 9, "C": 37, "K": 5, "R": 3, "s": 3},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, Y, X, C, K, R = (dims[key] for key in ("N", "Y", "X", "C", "K", "R"))
    x = torch.randn(N, Y, X, C, device=device, dtype=dtype)
    w = torch.randn(R, R, C, K, device=device, dtype=dtype) * dims["s"] / max(1, R * R * C) ** 0.5
    return x, w, dims["s"]


# ---- backward ----


@triton.jit
def patch_pixels(i, pixels, r, t, Y, X, OY, OX, stride, pad):
    """The output that input pixel i reached by tap (r, t), and whether there is one."""
    oy, ox = i // X % Y * stride + r - pad, i % X * stride + t - pad
    inside = (i < pixels) & (oy >= 0) & (oy < OY) & (ox >= 0) & (ox < OX)
    return (i // (Y * X) * OY + oy) * OX + ox, inside


@triton.jit
def input_kernel(
    dy_ptr, w_ptr, dx_ptr, pixels, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        o, inside = patch_pixels(i, pixels, tap // R, tap % R, Y, X, OY, OX, stride, pad)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            w = load_tile(w_ptr, tap * C + c, k, c < C, K)
            dy = load_tile(dy_ptr, o, k, inside, K)
            acc = tl.dot(dy, tl.trans(w), acc, input_precision=PRECISION)
    store_tile(dx_ptr, acc, i, c, i < pixels, C)


@triton.jit
def weight_slot_kernel(
    x_ptr, dy_ptr, slots_ptr, pixels, part, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dw of a tap from one part of the input pixels."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap, slot = tl.program_id(2) % (R * R), (tl.program_id(2) // (R * R)).to(tl.int64)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, pixels), BLOCK):
        i = start + tl.arange(0, BLOCK)
        o, inside = patch_pixels(i, pixels, tap // R, tap % R, Y, X, OY, OX, stride, pad)
        x = load_tile(x_ptr, i, c, i < pixels, C)
        acc = tl.dot(tl.trans(x), load_tile(dy_ptr, o, k, inside, K), acc, input_precision=PRECISION)
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


class ConvTranspose2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, stride):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride = stride
        return conv_transpose2d(x, w, stride)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        sizes, tiles = sizes_of(x, w, ctx.stride), tiling(x)
        (N, Y, X, C), (R, K), BLOCK = x.shape, w.shape[1::2], tiles["BLOCK"]
        pixels, across = N * Y * X, triton.cdiv(C, BLOCK)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            input_kernel[(triton.cdiv(pixels, BLOCK), across)](dy, w, dx, pixels, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            grid = (across, triton.cdiv(K, BLOCK))
            wanted = triton.cdiv(1024, max(1, grid[0] * grid[1] * R * R))  # parts, to fill a GPU
            part = triton.cdiv(max(pixels, 1), wanted * BLOCK) * BLOCK
            count = triton.cdiv(pixels, part)
            slots = torch.empty((count, *w.shape), device=x.device, dtype=torch.float32)
            weight_slot_kernel[(*grid, R * R * count)](x, dy, slots, pixels, part, *sizes, **tiles)
            dw = torch.empty_like(w)
            sum_slots_kernel[(triton.cdiv(w.numel(), 256),)](slots, dw, count, w.numel(), BLOCK=256)
        return dx, dw, None


def conv_transpose2d_autograd(x, w, stride):
    return ConvTranspose2d.apply(x, w, stride)

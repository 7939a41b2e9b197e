"""2D convolution, channels last, as an implicit matrix product.

Forward    y[p, k] = sum over taps (r, s) and channels c of x[p * stride - pad + (r, s), c] w[r, s, c, k]
Backward   dx[i, c] = sum of dy[p, k] w[r, s, c, k] over k and the taps for which
           p = (i + pad - (r, s)) / stride is an output
           dw[r, s, c, k] = sum over p of x[p * stride - pad + (r, s), c] dy[p, k]

Forward schedule: a program owns (tile of output pixels, tile of k) and walks taps and channels; patches are
gathered on load.
Backward schedule: both gradients are implicit products of their own. dx's owner is a tile of input pixels:
for each tap the output that saw it is one division away, so it gathers, where the forward's transpose would
scatter. dw's owner is (tap, tile of c, tile of k): it walks all pixels with its tile in registers and
stores once. No patch matrix, no split, no atomics.

op: conv2d
schedule: swap_owner, gather_transpose
difficulty: 3
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
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64, "num_warps": 8}


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, y_ptr, pixels, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, oy, ox = p // (OY * OX), p // OX % OY, p % OX
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        y, x = oy * stride - pad + tap // R, ox * stride - pad + tap % R
        inside = (p < pixels) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            a_offs = ((n * Y + y) * X + x)[:, None].to(tl.int64) * C + c[None, :]
            a = tl.load(x_ptr + a_offs, mask=inside[:, None] & (c[None, :] < C), other=0.0)
            w_mask = (c[:, None] < C) & (k[None, :] < K)
            w = tl.load(w_ptr + (tap * C + c[:, None]) * K + k[None, :], mask=w_mask, other=0.0)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
    y_mask = (p[:, None] < pixels) & (k[None, :] < K)
    tl.store(y_ptr + p[:, None].to(tl.int64) * K + k[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0, 1))
def conv2d(x, w, stride=1):
    """x: (N, Y, X, C); w: (R, R, C, K), padded by R // 2 on every side."""
    if w.shape[0] != w.shape[1] or w.shape[2] != x.shape[3]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit")
    x, w = x.contiguous(), w.contiguous()
    N, Y, X, C = x.shape
    R, K = w.shape[0], w.shape[3]
    pad = R // 2
    OY, OX = (Y + 2 * pad - R) // stride + 1, (X + 2 * pad - R) // stride + 1
    y = torch.empty((N, OY, OX, K), device=x.device, dtype=x.dtype)
    pixels = N * OY * OX
    tiles = tiling(x)
    grid = (triton.cdiv(pixels, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))
    conv_kernel[grid](x, w, y, pixels, Y, X, C, OY, OX, K, R, stride, pad, **tiles)
    return y


def reference(x, w, stride=1):
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(3, 2, 0, 1).contiguous()
    y = torch.nn.functional.conv2d(x, w, None, stride, w.shape[2] // 2)
    return y.permute(0, 2, 3, 1)


SWEEP = [
    {"N": 32, "Y": 56, "X": 56, "C": 64, "K": 64, "R": 3, "s": 1},
    {"N": 64, "Y": 28, "X": 28, "C": 128, "K": 256, "R": 3, "s": 2},
    {"N": 17, "Y": 61, "X": 47, "C": 96, "K": 80, "R": 3, "s": 1},
]
SWEEP_CPU = [
    {"N": 1, "Y": 7, "X": 13, "C": 16, "K": 24, "R": 3, "s": 1},
    {"N": 2, "Y": 6, "X": 5, "C": 5, "K": 4, "R": 3, "s": 2},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, Y, X, C, K, R = (dims[key] for key in ("N", "Y", "X", "C", "K", "R"))
    x = torch.randn(N, Y, X, C, device=device, dtype=dtype)
    return (x, torch.randn(R, R, C, K, device=device, dtype=dtype) / R), {"stride": dims["s"]}


# ---- backward ----


@triton.jit
def dx_kernel(
    dy_ptr, w_ptr, dx_ptr, pixels, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, y, x = p // (Y * X), p // X % Y, p % X
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        ty, tx = y + pad - tap // R, x + pad - tap % R
        oy, ox = ty // stride, tx // stride
        on_grid = (ty >= 0) & (tx >= 0) & (oy * stride == ty) & (ox * stride == tx) & (oy < OY) & (ox < OX)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            dy_offs = ((n * OY + oy) * OX + ox)[:, None].to(tl.int64) * K + k[None, :]
            dy_mask = (on_grid & (p < pixels))[:, None] & (k[None, :] < K)
            dy = tl.load(dy_ptr + dy_offs, mask=dy_mask, other=0.0)
            w_mask = (c[None, :] < C) & (k[:, None] < K)
            w_t = tl.load(w_ptr + (tap * C + c[None, :]) * K + k[:, None], mask=w_mask, other=0.0)
            acc = tl.dot(dy, w_t, acc, input_precision=PRECISION)
    dx_mask = (p[:, None] < pixels) & (c[None, :] < C)
    tl.store(dx_ptr + p[:, None].to(tl.int64) * C + c[None, :], acc.to(dx_ptr.dtype.element_ty), mask=dx_mask)


@triton.jit
def dw_kernel(
    x_ptr, dy_ptr, dw_ptr, pixels, Y, X, C, OY, OX, K, R, stride, pad,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.program_id(2)
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, pixels, BLOCK):
        p = start + tl.arange(0, BLOCK)
        y, x = p // OX % OY * stride - pad + tap // R, p % OX * stride - pad + tap % R
        inside = (p < pixels) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
        a_offs = ((p // (OY * OX) * Y + y) * X + x)[None, :].to(tl.int64) * C + c[:, None]
        a_t = tl.load(x_ptr + a_offs, mask=inside[None, :] & (c[:, None] < C), other=0.0)
        dy_mask = (p[:, None] < pixels) & (k[None, :] < K)
        dy = tl.load(dy_ptr + p[:, None].to(tl.int64) * K + k[None, :], mask=dy_mask, other=0.0)
        acc = tl.dot(a_t, dy, acc, input_precision=PRECISION)
    dw_mask = (c[:, None] < C) & (k[None, :] < K)
    tl.store(dw_ptr + (tap * C + c[:, None]) * K + k[None, :], acc.to(dw_ptr.dtype.element_ty), mask=dw_mask)


class Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, stride):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.stride = stride
        return conv2d(x, w, stride)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        N, Y, X, C = x.shape
        _, OY, OX, K = dy.shape
        R = w.shape[0]
        sizes = (Y, X, C, OY, OX, K, R, ctx.stride, R // 2)
        tiles = tiling(x)
        BLOCK = tiles["BLOCK"]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (triton.cdiv(N * Y * X, BLOCK), triton.cdiv(C, BLOCK))
            dx_kernel[grid](dy, w, dx, N * Y * X, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            grid = (triton.cdiv(C, BLOCK), triton.cdiv(K, BLOCK), R * R)
            dw_kernel[grid](x, dy, dw, N * OY * OX, *sizes, **tiles)
        return dx, dw, None


def conv2d_autograd(x, w, stride=1):
    return Conv2d.apply(x, w, stride)

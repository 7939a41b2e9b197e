"""Convolution, channels first, by an explicit matrix of patches, kept for the backward.

Forward    cols[n, (c, r, q), o] = x[n, c, S o + (r, q) - pad], 0 outside;  Y_n = W cols_n with W: (K, C R R)
Backward   dcols_n = W^T dY_n,   dW = sum_n dY_n cols_n^T;
           dx[n, c, i] = sum over the taps (r, q) with S o = i + pad - (r, q) for an output o of
           dcols[n, (c, r, q), o]

Forward schedule: one kernel unfolds, and one product, with no index arithmetic left in it, does the rest. For
the price of R R / S^2 times the memory of x, the product can be as simple and as fast as the machine allows.
Backward schedule: the matrix was made once and serves again, so dW is a plain product over pixels of two
tensors in memory, split over images into slots that a small kernel adds. dcols is the same product kernel
with W transposed on load. What is left is folding dcols back, the transpose of the unfolding: a scatter for
the owner of a column, a gather for the owner of a pixel, which finds for each tap by one division whether an
output saw it, and stores dx once. No atomics, and dcols is the only large temporary.

op: conv2d
schedule: gather_transpose, swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiles_of(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def im2col_kernel(x_ptr, cols_ptr, n, H, W, OH, OW, R, stride, pad, BLOCK: tl.constexpr):
    """n numbers in all, (image and channel, r, q, output)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o, tap, plane = at % (OH * OW), at // (OH * OW) % (R * R), at // (OH * OW * R * R)
    i = o // OW * stride + tap // R - pad
    j = o % OW * stride + tap % R - pad
    inside = (at < n) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    tl.store(cols_ptr + at, tl.load(x_ptr + (plane * H + i) * W + j, mask=inside, other=0.0), mask=at < n)


@triton.jit
def load_tile(ptr, rows, cols, R, C, step_r, step_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * step_r + cols[None, :] * step_c, mask=mask, other=0.0)


@triton.jit
def product_kernel(
    w_ptr, b_ptr, y_ptr, M, D, P, step_m, step_d, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Y_n = W B_n, W[m, d] at m step_m + d step_d, B_n: (D, P), Y_n: (M, P)."""
    image = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, m, d, M, D, step_m, step_d)
        y = tl.dot(w, load_tile(b_ptr + image * D * P, d, p, D, P, P, 1), y, input_precision=PRECISION)
    mask = (m[:, None] < M) & (p[None, :] < P)
    offs = (image * M + m[:, None]) * P + p[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def product(w, b, M, D, step_m, step_d):
    (N, P), tiles = (b.shape[0], b.shape[-1]), tiles_of(b)
    y = torch.empty((N, M, P), device=b.device, dtype=b.dtype)
    grid = (N, triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(P, tiles["BLOCK"]))
    product_kernel[grid](w, b, y, M, D, P, step_m, step_d, **tiles)
    return y


def conv_forward(x, w, stride):
    (N, C, H, W), (K, D, R, _) = x.shape, w.shape
    pad = R // 2
    OH, OW = (H + 2 * pad - R) // stride + 1, (W + 2 * pad - R) // stride + 1
    if D != C or w.shape[3] != R or stride < 1 or OH < 1 or OW < 1:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit at stride {stride}")
    cols = torch.empty((N, C * R * R, OH * OW), device=x.device, dtype=x.dtype)
    im2col_kernel[(triton.cdiv(cols.numel(), 512),)](
        x, cols, cols.numel(), H, W, OH, OW, R, stride, pad, BLOCK=512
    )
    y = product(w, cols, K, C * R * R, C * R * R, 1)
    return y.view(N, K, OH, OW), cols


@autodiff(inputs_require_grad=(0, 1))
def conv2d(x, w, stride=1):
    """x: (N, C, H, W); w: (K, C, R, R), padded by R // 2 on every side."""
    return conv_forward(x.contiguous(), w.contiguous(), stride)[0]


def reference(x, w, stride=1):
    return torch.nn.functional.conv2d(x, w, stride=stride, padding=w.shape[2] // 2)


SWEEP = [
    {"N": 8, "C": 64, "H": 56, "W": 56, "K": 128, "R": 3, "s": 1},
    {"N": 5, "C": 3, "H": 127, "W": 90, "K": 70, "R": 7, "s": 2},
]
SWEEP_CPU = [
    {"N": 2, "C": 4, "H": 9, "W": 8, "K": 16, "R": 3, "s": 2},
    {"N": 1, "C": 5, "H": 6, "W": 7, "K": 35, "R": 2, "s": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, H, W, K, R = (dims[name] for name in "NCHWKR")
    R = max(1, min(R, H, W))
    x = torch.randn(N, C, H, W, device=device, dtype=dtype)
    w = torch.randn(K, C, R, R, device=device, dtype=dtype) / (R * max(1, C) ** 0.5)
    return (x, w), {"stride": max(1, dims["s"])}


# ---- backward ----

MAX_SLOTS = 16


@triton.jit
def weight_parts_kernel(
    dy_ptr, cols_ptr, part_ptr, N, K, D, P, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for n in range(slot, N, tl.num_programs(0)):
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            dy = load_tile(dy_ptr + n * K * P, k, p, K, P, P, 1)
            cols = load_tile(cols_ptr + n * D * P, p, d, P, D, 1, P)
            dw = tl.dot(dy, cols, dw, input_precision=PRECISION)
    mask = (k[:, None] < K) & (d[None, :] < D)
    tl.store(part_ptr + (slot * K + k[:, None]) * D + d[None, :], dw, mask=mask)


@triton.jit
def add_slots_kernel(part_ptr, dw_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def col2im_kernel(dcols_ptr, dx_ptr, n, H, W, OH, OW, R, stride, pad, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane, i, j = at // (H * W), at // W % H, at % W
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        v, u = i + pad - tap // R, j + pad - tap % R
        oy, ox = v // stride, u // stride
        on_grid = (v >= 0) & (u >= 0) & (oy * stride == v) & (ox * stride == u)
        mask = (at < n) & on_grid & (oy < OH) & (ox < OW)
        offs = ((plane * R * R + tap) * OH + oy) * OW + ox
        dx += tl.load(dcols_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


class Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, stride):
        x, w = x.contiguous(), w.contiguous()
        y, cols = conv_forward(x, w, stride)
        ctx.save_for_backward(w, cols)
        ctx.x_shape, ctx.stride = x.shape, stride
        return y

    @staticmethod
    def backward(ctx, dy):
        w, cols = ctx.saved_tensors
        (N, C, H, W), (K, _, R, _), (OH, OW) = ctx.x_shape, w.shape, dy.shape[2:]
        dy, D, P = dy.contiguous().view(N, K, OH * OW), C * R * R, OH * OW
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dcols = product(w, dy, D, K, 1, D)
            dx = torch.empty(ctx.x_shape, device=dy.device, dtype=dy.dtype)
            col2im_kernel[(triton.cdiv(dx.numel(), 256),)](
                dcols, dx, dx.numel(), H, W, OH, OW, R, ctx.stride, R // 2, BLOCK=256
            )
        if ctx.needs_input_grad[1]:
            dw, slots, tiles = torch.empty_like(w), min(N, MAX_SLOTS), tiles_of(dy)
            part = torch.empty((slots, K, D), device=w.device, dtype=torch.float32)
            grid = (slots, triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"]))
            weight_parts_kernel[grid](dy, cols, part, N, K, D, P, **tiles)
            add_slots_kernel[(triton.cdiv(K * D, 256),)](part, dw, K * D, slots, BLOCK=256)
        return dx, dw, None


def conv2d_autograd(x, w, stride=1):
    return Conv2d.apply(x, w, stride)

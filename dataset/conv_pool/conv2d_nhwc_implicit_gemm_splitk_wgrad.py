"""2D convolution, channels last, stride 1: each gradient a product with patches that are made on load.

Forward    y[p, k] = sum over q = (r, s, c) of X[p, q] w[q, k],  X[p, q] = x[p + (r, s) - pad, c], R odd,
           pad = (R - 1) / 2; X is the patch matrix, R R times x, and is never stored
Backward   dx[p, c] = sum over (r, s, k) of dy[p + (r, s) - pad, k] w[R-1-r, R-1-s, c, k]: the patches of dy
           times the weights with taps mirrored and channels turned;   dw[q, k] = sum_p X[p, q] dy[p, k]

Forward schedule: a product of (pixels, R R C) and (R R C, K); q is walked as one axis, and a lane finds its
tap and channel by division, so that few channels still fill a tile of 32 or 64.
Backward schedule: dx is the forward's kernel on dy, told to read the weights mirrored. dw is a small matrix,
R R C by K, from a sum over all pixels of the batch, some hundred thousand: a hundred tiles with an owner
each would leave most of a GPU idle. The pixels are split: the owner of (tile of q, tile of k, part) walks its
part and stores its tile in the part's slot; a second kernel adds the slots in order. There are as many parts
as it takes to fill the GPU, so that a layer with many tiles has few slots.

op: conv2d
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


@triton.jit
def load_patches(x_ptr, p, q, pixels, H, W, C, R):
    """A tile of the patch matrix, (p, q)."""
    tap, c = q // C, q % C
    y = p[:, None] // W % H + tap[None, :] // R - R // 2
    x = p[:, None] % W + tap[None, :] % R - R // 2
    mask = (p[:, None] < pixels) & (tap[None, :] < R * R) & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    pixel = (p[:, None] // (W * H)).to(tl.int64) * H * W + y * W + x
    return tl.load(x_ptr + pixel * C + c[None, :], mask=mask, other=0.0)


@triton.jit
def load_weights(w_ptr, q, k, C, K, R, MIRRORED: tl.constexpr):
    """A tile (q, k) of w (R R C, K); mirrored, of the matrix that dx wants from w (R, R, K, C)."""
    mask = (q[:, None] < R * R * C) & (k[None, :] < K)
    if MIRRORED:
        tap, c = R * R - 1 - q // C, q % C
        at = (tap[:, None] * K + k[None, :]) * C + c[:, None]
    else:
        at = q[:, None] * K + k[None, :]
    return tl.load(w_ptr + at, mask=mask, other=0.0)


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, y_ptr, pixels, H, W, C, K, R,
    MIRRORED: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, R * R * C, BLOCK):
        q = start + tl.arange(0, BLOCK)
        w = load_weights(w_ptr, q, k, C, K, R, MIRRORED)
        y = tl.dot(load_patches(x_ptr, p, q, pixels, H, W, C, R), w, y, input_precision=PRECISION)
    at = y_ptr + p[:, None].to(tl.int64) * K + k[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(p[:, None] < pixels) & (k[None, :] < K))


def convolve(x, w, K, mirrored):
    (N, H, W, C), tiles = x.shape, tiling(x)
    y = torch.empty((N, H, W, K), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(N * H * W, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))
    conv_kernel[grid](x, w, y, N * H * W, H, W, C, K, w.shape[0], MIRRORED=mirrored, **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def conv2d(x, w):
    """x: (N, H, W, C); w: (R, R, C, K), R odd; gives (N, H, W, K)."""
    if w.shape[0] != w.shape[1] or w.shape[0] % 2 == 0 or w.shape[2] != x.shape[3]:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit; taps are odd and square")
    return convolve(x.contiguous(), w.contiguous(), w.shape[3], False)


def reference(x, w):
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1), padding=w.shape[0] // 2)
    return y.permute(0, 2, 3, 1)


SWEEP = [
    {"N": 32, "H": 56, "W": 56, "C": 64, "K": 64, "half": 1},
    {"N": 3, "H": 61, "W": 45, "C": 20, "K": 130, "half": 2},
]
SWEEP_CPU = [
    {"N": 2, "H": 5, "W": 7, "C": 6, "K": 9, "half": 1},
    {"N": 1, "H": 9, "W": 8, "C": 3, "K": 36, "half": 0},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, H, W, C, K = (dims[name] for name in "NHWCK")
    R = 2 * dims["half"] + 1
    x = torch.randn(N, H, W, C, device=device, dtype=dtype)
    return x, torch.randn(R, R, C, K, device=device, dtype=dtype) / max(1, R * R * C) ** 0.5


# ---- backward ----


@triton.jit
def weight_slot_kernel(
    x_ptr, dy_ptr, slots_ptr, pixels, H, W, C, K, R, part, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.program_id(2)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * part, tl.minimum((slot + 1) * part, pixels), BLOCK):
        p = start + tl.arange(0, BLOCK)
        mask = (p[:, None] < pixels) & (k[None, :] < K)
        dy = tl.load(dy_ptr + p[:, None].to(tl.int64) * K + k[None, :], mask=mask, other=0.0)
        x = tl.trans(load_patches(x_ptr, p, q, pixels, H, W, C, R))
        dw = tl.dot(x, dy, dw, input_precision=PRECISION)
    at = slots_ptr + slot.to(tl.int64) * R * R * C * K + q[:, None] * K + k[None, :]
    tl.store(at, dw, mask=(q[:, None] < R * R * C) & (k[None, :] < K))


@triton.jit
def sum_slots_kernel(slots_ptr, dw_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(dw_ptr + i, dw.to(dw_ptr.dtype.element_ty), mask=i < size)


class Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return conv2d(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (N, H, W, C), (R, _, _, K), dy, dx, dw = x.shape, w.shape, dy.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = convolve(dy, w, C, True)
        if ctx.needs_input_grad[1]:
            tiles, pixels, dw = tiling(x), N * H * W, torch.empty_like(w)
            BLOCK = tiles["BLOCK"]
            grid = (triton.cdiv(R * R * C, BLOCK), triton.cdiv(K, BLOCK))
            wanted = triton.cdiv(512, max(1, grid[0] * grid[1]))
            part = triton.cdiv(max(1, pixels), wanted * BLOCK) * BLOCK
            count = triton.cdiv(pixels, part)
            slots = torch.empty((count, R, R, C, K), device=x.device, dtype=torch.float32)
            weight_slot_kernel[(*grid, count)](x, dy, slots, pixels, H, W, C, K, R, part, **tiles)
            sum_slots_kernel[(triton.cdiv(w.numel(), 256),)](slots, dw, count, w.numel(), BLOCK=256)
        return dx, dw


def conv2d_autograd(x, w):
    return Conv2d.apply(x, w)

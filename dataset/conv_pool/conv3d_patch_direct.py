"""3D convolution, channels first, as an implicit product: video and volumes.

Forward    y[n, k, o] = sum over taps t = (d, r, q) and channels c of w[k, c, t] x[n, c, o + t - pad],
           odd sides (D, R, R), pad half of each, so that the volume keeps its size; x = 0 outside
Backward   dx[n, c, i] = sum over t and k of w[k, c, t] dy[n, k, i - t + pad];
           dw[k, c, t] = sum over n and o of dy[n, k, o] x[n, c, o + t - pad]

Forward schedule: a program owns (image, tile of k, tile of voxels) and walks taps and channels. Voxels are
what lies side by side, so they are the columns of the tiles, and a tap is the same tile of x at another
offset.
Backward schedule: dx is the forward with mirrored taps and w transposed on load: an input-stationary gather.
For dw the voxels are the inner axis of both factors: a program owns (tap, slot, tile of k by c) and walks the
volumes slot, slot + G, ... in tiles of voxels, dy at one place and x at the tap's. There are D R R taps, so
even small C and K make many programs, and slots are for small batches of large volumes no more than their
number; a last kernel adds them.

op: conv3d
schedule: gather_transpose, swap_owner, partials_then_reduce
difficulty: 4
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
def load_voxels(ptr, c, p, tap, sign, C, Z, Y, X, D, R):
    """Channels by voxels, moved by a tap (sign 1) or against it (sign -1), 0 outside."""
    dz, dy, dx = tap // (R * R) - D // 2, tap // R % R - R // 2, tap % R - R // 2
    z, y, x = p // (Y * X) + sign * dz, p // X % Y + sign * dy, p % X + sign * dx
    inside = (p < Z * Y * X) & (z >= 0) & (z < Z) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
    offs = c[:, None].to(tl.int64) * (Z * Y * X) + ((z * Y + y) * X + x)[None, :]
    return tl.load(ptr + offs, mask=(c[:, None] < C) & inside[None, :], other=0.0)


@triton.jit
def load_weights(w_ptr, k, c, tap, K, C, TAPS):
    mask = (k[:, None] < K) & (c[None, :] < C)
    return tl.load(w_ptr + (k[:, None] * C + c[None, :]) * TAPS + tap, mask=mask, other=0.0)


@triton.jit
def store_voxels(ptr, value, c, p, C, P):
    mask = (c[:, None] < C) & (p[None, :] < P)
    offs = c[:, None].to(tl.int64) * P + p[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv3d_kernel(
    x_ptr, w_ptr, y_ptr, C, K, Z, Y, X, D, R, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    P = Z * Y * X
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(D * R * R):
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = load_voxels(x_ptr + n * C * P, c, p, tap, 1, C, Z, Y, X, D, R)
            w = load_weights(w_ptr, k, c, tap, K, C, D * R * R)
            y = tl.dot(w, x, y, input_precision=PRECISION)
    store_voxels(y_ptr + n * K * P, y, k, p, K, P)


@autodiff(inputs_require_grad=(0, 1))
def conv3d(x, w):
    """x: (N, C, Z, Y, X); w: (K, C, D, R, R), D and R odd; gives (N, K, Z, Y, X)."""
    (N, C, Z, Y, X), (K, E, D, R, _) = x.shape, w.shape
    if E != C or D % 2 == 0 or R % 2 == 0 or w.shape[4] != R:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not fit")
    y, tiles = torch.empty((N, K, Z, Y, X), device=x.device, dtype=x.dtype), tiles_of(x)
    grid = (N, triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(Z * Y * X, tiles["BLOCK"]))
    conv3d_kernel[grid](x.contiguous(), w.contiguous(), y, C, K, Z, Y, X, D, R, **tiles)
    return y


def reference(x, w):
    return torch.nn.functional.conv3d(x, w, padding=(w.shape[2] // 2, w.shape[3] // 2, w.shape[3] // 2))


SWEEP = [
    {"N": 2, "C": 32, "K": 64, "Z": 16, "Y": 56, "X": 56, "D": 3, "R": 3},
    {"N": 3, "C": 20, "K": 35, "Z": 9, "Y": 31, "X": 45, "D": 1, "R": 3},
]
SWEEP_CPU = [
    {"N": 1, "C": 5, "K": 8, "Z": 3, "Y": 4, "X": 5, "D": 3, "R": 3},
    {"N": 2, "C": 35, "K": 33, "Z": 2, "Y": 3, "X": 3, "D": 3, "R": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, K, Z, Y, X, D, R = (dims[name] for name in "NCKZYXDR")
    D, R = min(D, 3), min(R, 3)
    D, R = D + 1 - D % 2, R + 1 - R % 2
    x = torch.randn(N, C, Z, Y, X, device=device, dtype=dtype)
    return x, torch.randn(K, C, D, R, R, device=device, dtype=dtype) / max(1, C * D * R * R) ** 0.5


# ---- backward ----

MAX_SLOTS = 8


@triton.jit
def dx_kernel(
    dy_ptr, w_ptr, dx_ptr, C, K, Z, Y, X, D, R, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    P = Z * Y * X
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(D * R * R):
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            dy = load_voxels(dy_ptr + n * K * P, k, p, tap, -1, K, Z, Y, X, D, R)
            w = load_weights(w_ptr, k, c, tap, K, C, D * R * R)
            dx = tl.dot(tl.trans(w), dy, dx, input_precision=PRECISION)
    store_voxels(dx_ptr + n * C * P, dx, c, p, C, P)


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, part_ptr, N, slots, C, K, Z, Y, X, D, R,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tap, slot = tl.program_id(0) // slots, (tl.program_id(0) % slots).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    P, TAPS = Z * Y * X, D * R * R
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for n in range(slot, N, slots):
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            dy_mask = (k[:, None] < K) & (p[None, :] < P)
            dy = tl.load(dy_ptr + (n * K + k[:, None]) * P + p[None, :], mask=dy_mask, other=0.0)
            x = load_voxels(x_ptr + n * C * P, c, p, tap, 1, C, Z, Y, X, D, R)
            dw = tl.dot(dy, tl.trans(x), dw, input_precision=PRECISION)
    mask = (k[:, None] < K) & (c[None, :] < C)
    tl.store(part_ptr + ((slot * K + k[:, None]) * C + c[None, :]) * TAPS + tap, dw, mask=mask)


@triton.jit
def add_slots_kernel(part_ptr, dw_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=at < n)


class Conv3d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return conv3d(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (N, C, Z, Y, X), (K, _, D, R, _), tiles = x.shape, w.shape, tiles_of(x)
        dy, BLOCK, sizes = dy.contiguous(), tiles["BLOCK"], (C, K, Z, Y, X, D, R)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid = (N, triton.cdiv(C, BLOCK), triton.cdiv(Z * Y * X, BLOCK))
            dx_kernel[grid](dy, w, dx, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            dw, slots = torch.empty_like(w), min(N, MAX_SLOTS)
            part = torch.empty((slots, *w.shape), device=w.device, dtype=torch.float32)
            grid = (D * R * R * slots, triton.cdiv(K, BLOCK), triton.cdiv(C, BLOCK))
            weight_parts_kernel[grid](x, dy, part, N, slots, *sizes, **tiles)
            add_slots_kernel[(triton.cdiv(dw.numel(), 256),)](part, dw, dw.numel(), slots, BLOCK=256)
        return dx, dw


def conv3d_autograd(x, w):
    return Conv3d.apply(x, w)

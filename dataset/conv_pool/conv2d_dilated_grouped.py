"""Dilated convolution in groups, channels last: ResNeXt blocks, segmentation heads.

Forward    output channel k of group g = k // (K / G) sees the C / G input channels of its group:
           y[p, k] = sum over taps (r, q) and c of the group of x[p + d (r, q) - pad, c] w[r, q, c, k],
           pad = d (R - 1) / 2, so that the image keeps its size
Backward   dx[i, c] = sum over taps and the k of c's group of dy[i - d (r, q) + pad, k] w[r, q, c, k];
           dw[r, q, c, k] = sum_p x[p + d (r, q) - pad, c] dy[p, k]

Forward schedule: a program owns (tile of pixels, group, tile of the group's outputs), walks taps and the
group's channels, and gathers patches on load; channels of other groups are never touched.
Backward schedule: with stride 1 the taps of dx are the forward's looking the other way: the owner of a tile
of input pixels gathers dy once a tap, and a group stays a group. dw is small in each group, C K / G^2 numbers
a tap, and its sum runs over all pixels: a program owns (tap and slot, group, tile of the group's matrix) and
walks every G-th tile of pixels; a second kernel adds the slots. Taps are 9, groups many, so the slots may be
few.

op: conv2d_grouped
schedule: gather_transpose, swap_owner, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling():
    """Groups are narrow, 4 to 64 channels: tiles of pixels are longer than wide."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_P": 64, "BLOCK_C": 32}


@triton.jit
def load_pixels(ptr, p, down, across, c, width, pixels, H, W, row):
    """A group's channels c < width of the pixels moved down and across; a pixel has `row` channels."""
    i, j = p // W % H + down, p % W + across
    inside = (p < pixels) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    offs = (p + down * W + across)[:, None] * row + c[None, :]
    return tl.load(ptr + offs, mask=inside[:, None] & (c[None, :] < width), other=0.0)


@triton.jit
def load_weights(w_ptr, tap, c, k, wide, tall, K):
    """w[tap] for a group's inputs c < tall and outputs k < wide; the pointer is at the group's first k."""
    mask = (c[:, None] < tall) & (k[None, :] < wide)
    return tl.load(w_ptr + (tap * tall + c[:, None]) * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def store_pixels(ptr, value, p, c, width, pixels, row):
    mask = (p[:, None] < pixels) & (c[None, :] < width)
    tl.store(ptr + p[:, None] * row + c[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def grouped_conv_kernel(
    x_ptr, w_ptr, y_ptr, pixels, H, W, C, K, G, R, dilation,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tl.program_id(1)
    k = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    tall, wide = C // G, K // G
    y = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for tap in range(R * R):
        down, across = (tap // R - R // 2) * dilation, (tap % R - R // 2) * dilation
        for start in range(0, tall, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            x = load_pixels(x_ptr + g * tall, p, down, across, c, tall, pixels, H, W, C)
            w = load_weights(w_ptr + g * wide, tap, c, k, wide, tall, K)
            y = tl.dot(x, w, y, input_precision=PRECISION)
    store_pixels(y_ptr + g * wide, y, p, k, wide, pixels, K)


@autodiff(inputs_require_grad=(0, 1))
def grouped_conv2d(x, w, G, dilation):
    """x: (N, H, W, C); w: (R, R, C / G, K), R odd, outputs sorted by group; gives (N, H, W, K)."""
    (N, H, W, C), (R, _, tall, K) = x.shape, w.shape
    if R % 2 == 0 or G * tall != C or K % G:
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)} do not make {G} groups")
    y, tiles = torch.empty((N, H, W, K), device=x.device, dtype=x.dtype), tiling()
    grid = (triton.cdiv(N * H * W, tiles["BLOCK_P"]), G, triton.cdiv(K // G, tiles["BLOCK_C"]))
    grouped_conv_kernel[grid](
        x.contiguous(), w.contiguous(), y, N * H * W, H, W, C, K, G, R, dilation, **tiles
    )
    return y


def reference(x, w, G, dilation):
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(3, 2, 0, 1).contiguous()
    pad = dilation * (w.shape[2] // 2)
    y = torch.nn.functional.conv2d(x, w, padding=pad, dilation=dilation, groups=G)
    return y.permute(0, 2, 3, 1)


SWEEP = [
    {"N": 16, "H": 56, "W": 56, "G": 32, "Cg": 8, "Kg": 8, "R": 3, "d": 1},
    {"N": 3, "H": 65, "W": 47, "G": 2, "Cg": 70, "Kg": 50, "R": 3, "d": 4},
]
SWEEP_CPU = [
    {"N": 2, "H": 6, "W": 7, "G": 2, "Cg": 6, "Kg": 5, "R": 3, "d": 2},
    {"N": 1, "H": 9, "W": 5, "G": 1, "Cg": 35, "Kg": 33, "R": 1, "d": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, H, W, G, Cg, R = (dims[name] for name in ("N", "H", "W", "G", "Cg", "R"))
    R += 1 - R % 2
    x = torch.randn(N, H, W, G * Cg, device=device, dtype=dtype)
    w = torch.randn(R, R, Cg, G * dims["Kg"], device=device, dtype=dtype) / (R * max(1, Cg) ** 0.5)
    return x, w, G, dims["d"]


# ---- backward ----

MAX_SLOTS = 16


@triton.jit
def dx_kernel(
    dy_ptr, w_ptr, dx_ptr, pixels, H, W, C, K, G, R, dilation,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tl.program_id(1)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    tall, wide = C // G, K // G
    dx = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    for tap in range(R * R):
        down, across = (R // 2 - tap // R) * dilation, (R // 2 - tap % R) * dilation
        for start in range(0, wide, BLOCK_C):
            k = start + tl.arange(0, BLOCK_C)
            dy = load_pixels(dy_ptr + g * wide, p, down, across, k, wide, pixels, H, W, K)
            w = load_weights(w_ptr + g * wide, tap, c, k, wide, tall, K)
            dx = tl.dot(dy, tl.trans(w), dx, input_precision=PRECISION)
    store_pixels(dx_ptr + g * tall, dx, p, c, tall, pixels, C)


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, part_ptr, pixels, H, W, C, K, G, R, dilation, slots,
    PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tap, slot = tl.program_id(0) // slots, tl.program_id(0) % slots
    g = tl.program_id(1)
    tall, wide = C // G, K // G
    tiles = tl.cdiv(wide, BLOCK_C)
    c = tl.program_id(2) // tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    k = tl.program_id(2) % tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    down, across = (tap // R - R // 2) * dilation, (tap % R - R // 2) * dilation
    dw = tl.zeros([BLOCK_C, BLOCK_C], dtype=tl.float32)
    for start in range(slot * BLOCK_P, pixels, slots * BLOCK_P):
        p = start + tl.arange(0, BLOCK_P).to(tl.int64)
        x = load_pixels(x_ptr + g * tall, p, down, across, c, tall, pixels, H, W, C)
        dy = load_pixels(dy_ptr + g * wide, p, 0, 0, k, wide, pixels, H, W, K)
        dw = tl.dot(tl.trans(x), dy, dw, input_precision=PRECISION)
    mask = (c[:, None] < tall) & (k[None, :] < wide)
    own = part_ptr + ((slot * R * R + tap) * tall + c[:, None]).to(tl.int64) * K + g * wide + k[None, :]
    tl.store(own, dw, mask=mask)


@triton.jit
def add_slots_kernel(part_ptr, dw_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(dw_ptr + at, dw.to(dw_ptr.dtype.element_ty), mask=at < n)


class GroupedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, G, dilation):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.options = G, dilation
        return grouped_conv2d(x, w, G, dilation)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (N, H, W, C), (R, _, tall, K), (G, dilation) = x.shape, w.shape, ctx.options
        dy, tiles = dy.contiguous(), tiling()
        sizes, BLOCK_C = (N * H * W, H, W, C, K, G, R, dilation), tiles["BLOCK_C"]
        pixel_tiles = triton.cdiv(N * H * W, tiles["BLOCK_P"])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(pixel_tiles, G, triton.cdiv(tall, BLOCK_C))](dy, w, dx, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            dw, slots = torch.empty_like(w), min(pixel_tiles, MAX_SLOTS)
            part = torch.empty((slots, *w.shape), device=w.device, dtype=torch.float32)
            grid = (R * R * slots, G, triton.cdiv(tall, BLOCK_C) * triton.cdiv(K // G, BLOCK_C))
            weight_parts_kernel[grid](x, dy, part, *sizes, slots, **tiles)
            add_slots_kernel[(triton.cdiv(dw.numel(), 256),)](part, dw, dw.numel(), slots, BLOCK=256)
        return dx, dw, None, None


def grouped_conv2d_autograd(x, w, G, dilation):
    return GroupedConv2d.apply(x, w, G, dilation)

"""Deformable convolution: every tap of every pixel has a learned offset and a learned weight.

Forward    tap t = (r, q) of pixel (i, j) reads x at (i + r - R / 2 + o_0, j + q - R / 2 + o_1), between
           pixels, and zero outside:  s_ptc = sum over four corners of wt x[corner, c],
           y_pk = sum_t sum_c m_pt s_ptc w[t, c, k]
Backward   dcol_ptc = sum_k dy_pk w[t, c, k];   dm_pt = sum_c dcol s;
           with a, b the fractions of the place down and across and x00 .. x11 its corners,
           do_0 = m sum_c dcol ((1 - b) (x10 - x00) + b (x11 - x01)),
           do_1 = m sum_c dcol ((1 - a) (x01 - x00) + a (x11 - x10));
           dx[corner, c] += m wt dcol;   dw[t, c, k] = sum_p m_pt s_ptc dy_pk

Forward schedule: a program owns (tile of pixels, tile of k), walks the taps and the channels, samples a tile
of columns in registers and multiplies it with w. Channels lie last, so a corner is a contiguous read.
Backward schedule: offsets and mask belong to one (pixel, tap), so that pair owns them: a program takes a tile
of pixels and one tap, makes dcol a tile of channels at a time by a product with w transposed, and uses it
three times while it is in registers: for dm and do, which are sums over channels in three vectors, and for
dx, added at four corners by atomics, since where they lie is data. dw is the product of sampled columns and
dy over all pixels: few tiles and a long sum, so pixels are split into slots, each samples its columns again
(storing them would take R^2 times the memory of x), and a second kernel adds the slots.

op: deform_conv2d
schedule: atomic_accumulate, partials_then_reduce, row_reduce_correct, recompute_from_stats
difficulty: 5
dtypes: fp32
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling():
    """Tile side and the precision of dots."""
    return {"PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee", "BLOCK": 32}


@triton.jit
def place(offset_ptr, p, tap, pixels, H, W, R):
    """Corner above and left of where a tap reads, and the fractions; far outside, where all is 0, is cut."""
    at = offset_ptr + (p * R * R + tap) * 2
    v = (p // W % H + tap // R - R // 2).to(tl.float32) + tl.load(at, mask=p < pixels, other=0.0)
    u = (p % W + tap % R - R // 2).to(tl.float32) + tl.load(at + 1, mask=p < pixels, other=0.0)
    v = tl.minimum(tl.maximum(v, -2.0), H + 1.0)
    u = tl.minimum(tl.maximum(u, -2.0), W + 1.0)
    i, j = tl.floor(v), tl.floor(u)
    return i.to(tl.int64), j.to(tl.int64), v - i, u - j


@triton.jit
def corner_at(p, i, j, c, pixels, H, W, C):
    """Offsets of one corner of each pixel's place, in a map of channels last, and which exist."""
    there = (p < pixels) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    offs = ((p // (H * W) * H + i) * W + j)[:, None] * C + c[None, :]
    return offs, there[:, None] & (c[None, :] < C)


@triton.jit
def load_corner(x_ptr, p, i, j, c, pixels, H, W, C):
    offs, mask = corner_at(p, i, j, c, pixels, H, W, C)
    return tl.load(x_ptr + offs, mask=mask, other=0.0)


@triton.jit
def sample(x_ptr, p, i, j, a, b, c, pixels, H, W, C):
    top = (1 - b) * load_corner(x_ptr, p, i, j, c, pixels, H, W, C)
    top += b * load_corner(x_ptr, p, i, j + 1, c, pixels, H, W, C)
    low = (1 - b) * load_corner(x_ptr, p, i + 1, j, c, pixels, H, W, C)
    low += b * load_corner(x_ptr, p, i + 1, j + 1, c, pixels, H, W, C)
    return (1 - a) * top + a * low


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value, mask=mask)


@triton.jit
def deform_conv_kernel(
    x_ptr, offset_ptr, m_ptr, w_ptr, y_ptr, pixels, H, W, C, K, R,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        i, j, a, b = place(offset_ptr, p, tap, pixels, H, W, R)
        m = tl.load(m_ptr + p * R * R + tap, mask=p < pixels, other=0.0)
        a, b = a[:, None], b[:, None]
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            col = m[:, None] * sample(x_ptr, p, i, j, a, b, c, pixels, H, W, C)
            w = load_tile(w_ptr + tap * C * K, c, k, C, K)
            y = tl.dot(col, w, y, input_precision=PRECISION)
    store_tile(y_ptr, y, p, k, pixels, K)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def deform_conv2d(x, offset, m, w):
    """x: (N, H, W, C); offset: (N, H, W, R R, 2), down before across; m: (N, H, W, R R); w: (R R, C, K), R
    odd, padded by R // 2; all float32. Gives (N, H, W, K)."""
    (N, H, W, C), (T, _, K) = x.shape, w.shape
    R = round(T**0.5)
    if R * R != T or R % 2 == 0 or offset.shape != (N, H, W, T, 2) or m.shape != (N, H, W, T):
        raise ValueError(f"offsets {tuple(offset.shape)} and masks {tuple(m.shape)} are not for {T} taps")
    x, offset, m, w = x.contiguous(), offset.contiguous(), m.contiguous(), w.contiguous()
    y, tiles = torch.empty((N, H, W, K), device=x.device, dtype=x.dtype), tiling()
    grid = (triton.cdiv(N * H * W, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))
    deform_conv_kernel[grid](x, offset, m, w, y, N * H * W, H, W, C, K, R, **tiles)
    return y


def reference(x, offset, m, w):
    (_, H, W, _), R = x.shape, round(w.shape[0] ** 0.5)
    i = torch.arange(H, device=x.device)[:, None] - R // 2
    j = torch.arange(W, device=x.device) - R // 2
    planes, y = x.permute(0, 3, 1, 2), 0
    for t in range(R * R):
        v, u = i + t // R + offset[..., t, 0], j + t % R + offset[..., t, 1]
        grid = torch.stack([(2 * u + 1) / W - 1, (2 * v + 1) / H - 1], dim=-1)
        s = torch.nn.functional.grid_sample(planes, grid, align_corners=False)
        y = y + torch.einsum("nchw,nhw,ck->nhwk", s, m[..., t], w[t])
    return y


SWEEP = [
    {"N": 4, "H": 64, "W": 64, "C": 128, "K": 128, "R": 3},
    {"N": 3, "H": 45, "W": 61, "C": 100, "K": 70, "R": 3},
]
SWEEP_CPU = [
    {"N": 1, "H": 7, "W": 8, "C": 16, "K": 16, "R": 3},
    {"N": 2, "H": 4, "W": 5, "C": 35, "K": 40, "R": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Offsets up to two pixels, none of them close to a pixel's centre, where their gradient jumps."""
    N, H, W, C, K, R = (dims[name] for name in "NHWCKR")
    T = R * R
    x = torch.randn(N, H, W, C, device=device, dtype=dtype)
    whole = torch.randint(-2, 2, (N, H, W, T, 2), device=device)
    offset = whole + 0.1 + 0.8 * torch.rand(N, H, W, T, 2, device=device)
    m = torch.rand(N, H, W, T, device=device, dtype=dtype)
    w = torch.randn(T, C, K, device=device, dtype=dtype) / max(1, T * C) ** 0.5
    return x, offset.to(dtype), m, w


# ---- backward ----

MAX_SLOTS = 32


@triton.jit
def add_corner(dx_ptr, p, i, j, c, value, pixels, H, W, C):
    offs, mask = corner_at(p, i, j, c, pixels, H, W, C)
    tl.atomic_add(dx_ptr + offs, value, mask=mask, sem="relaxed")


@triton.jit
def columns_backward_kernel(
    x_ptr, offset_ptr, m_ptr, w_ptr, dy_ptr, dx_ptr, doffset_ptr, dm_ptr, pixels, H, W, C, K, R,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tap = tl.program_id(1)
    i, j, down, across = place(offset_ptr, p, tap, pixels, H, W, R)
    m = tl.load(m_ptr + p * R * R + tap, mask=p < pixels, other=0.0)
    a, b = down[:, None], across[:, None]
    dm = tl.zeros([BLOCK], dtype=tl.float32)
    dv = tl.zeros([BLOCK], dtype=tl.float32)
    du = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        dcol = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for first in range(0, K, BLOCK):
            k = first + tl.arange(0, BLOCK)
            w = load_tile(w_ptr + tap * C * K, c, k, C, K)
            dy = load_tile(dy_ptr, p, k, pixels, K)
            dcol = tl.dot(dy, tl.trans(w), dcol, input_precision=PRECISION)
        x00 = load_corner(x_ptr, p, i, j, c, pixels, H, W, C)
        x01 = load_corner(x_ptr, p, i, j + 1, c, pixels, H, W, C)
        x10 = load_corner(x_ptr, p, i + 1, j, c, pixels, H, W, C)
        x11 = load_corner(x_ptr, p, i + 1, j + 1, c, pixels, H, W, C)
        s = (1 - a) * ((1 - b) * x00 + b * x01) + a * ((1 - b) * x10 + b * x11)
        dm += tl.sum(dcol * s, axis=1)
        dv += tl.sum(dcol * ((1 - b) * (x10 - x00) + b * (x11 - x01)), axis=1)
        du += tl.sum(dcol * ((1 - a) * (x01 - x00) + a * (x11 - x10)), axis=1)
        ds = m[:, None] * dcol
        add_corner(dx_ptr, p, i, j, c, (1 - a) * (1 - b) * ds, pixels, H, W, C)
        add_corner(dx_ptr, p, i, j + 1, c, (1 - a) * b * ds, pixels, H, W, C)
        add_corner(dx_ptr, p, i + 1, j, c, a * (1 - b) * ds, pixels, H, W, C)
        add_corner(dx_ptr, p, i + 1, j + 1, c, a * b * ds, pixels, H, W, C)
    own = p * R * R + tap
    tl.store(dm_ptr + own, dm, mask=p < pixels)
    tl.store(doffset_ptr + own * 2, m * dv, mask=p < pixels)
    tl.store(doffset_ptr + own * 2 + 1, m * du, mask=p < pixels)


@triton.jit
def weight_parts_kernel(
    x_ptr, offset_ptr, m_ptr, dy_ptr, part_ptr, pixels, H, W, C, K, R,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(1)
    tiles_k = tl.cdiv(K, BLOCK)
    c = tl.program_id(2) // tiles_k * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(2) % tiles_k * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        p = start + tl.arange(0, BLOCK).to(tl.int64)
        i, j, a, b = place(offset_ptr, p, tap, pixels, H, W, R)
        m = tl.load(m_ptr + p * R * R + tap, mask=p < pixels, other=0.0)
        col = m[:, None] * sample(x_ptr, p, i, j, a[:, None], b[:, None], c, pixels, H, W, C)
        dy = load_tile(dy_ptr, p, k, pixels, K)
        dw = tl.dot(tl.trans(col), dy, dw, input_precision=PRECISION)
    store_tile(part_ptr + (slot * R * R + tap) * C * K, dw, c, k, C, K)


@triton.jit
def add_slots_kernel(part_ptr, dw_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dw += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(dw_ptr + at, dw, mask=at < n)


class DeformConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offset, m, w):
        x, offset, m, w = x.contiguous(), offset.contiguous(), m.contiguous(), w.contiguous()
        ctx.save_for_backward(x, offset, m, w)
        return deform_conv2d(x, offset, m, w)

    @staticmethod
    def backward(ctx, dy):
        x, offset, m, w = ctx.saved_tensors
        (N, H, W, C), (T, _, K), dy = x.shape, w.shape, dy.contiguous()
        pixels, tiles, needs = N * H * W, tiling(), ctx.needs_input_grad
        sizes, BLOCK = (pixels, H, W, C, K, round(T**0.5)), tiles["BLOCK"]
        row_tiles = triton.cdiv(pixels, BLOCK)
        dx = doffset = dm = dw = None
        if needs[0] or needs[1] or needs[2]:
            dx, doffset, dm = torch.zeros_like(x), torch.empty_like(offset), torch.empty_like(m)
            columns_backward_kernel[(row_tiles, T)](x, offset, m, w, dy, dx, doffset, dm, *sizes, **tiles)
        if needs[3]:
            dw, slots = torch.empty_like(w), min(row_tiles, MAX_SLOTS)
            part = torch.empty((slots, T, C, K), device=x.device, dtype=torch.float32)
            grid = (slots, T, triton.cdiv(C, BLOCK) * triton.cdiv(K, BLOCK))
            weight_parts_kernel[grid](x, offset, m, dy, part, *sizes, **tiles)
            add_slots_kernel[(triton.cdiv(T * C * K, 256),)](part, dw, T * C * K, slots, BLOCK=256)
        return (
            dx if needs[0] else None,
            doffset if needs[1] else None,
            dm if needs[2] else None,
            dw,
        )


def deform_conv2d_autograd(x, offset, m, w):
    return DeformConv2d.apply(x, offset, m, w)

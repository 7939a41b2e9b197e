"""Convolution, channels last, with a folded batch norm (a scale and shift for each output) and a rectifier.

Forward    a[p, k] = sum over taps (r, q) and channels c of x[p + (r, q) - pad, c] w[r, q, c, k],
           u = s_k a + t_k,  y = max(u, 0);  pad = (R - 1) / 2
Backward   du = dy where u > 0, else 0;  dt_k = sum_p du,  ds_k = sum_p du a,  da = s_k du;
           dx[i, c] = sum over taps and k of da[i - (r, q) + pad, k] w[r, q, c, k];
           dw[r, q, c, k] = sum_p x[p + (r, q) - pad, c] da[p, k]

Forward schedule: an implicit product whose epilogue scales, shifts and cuts; a is saved in fp32, as ds needs
it and as u > 0 must mean the same later.
Backward schedule: da is read by all taps of dx and by all owners of dw, so it is made once: a program owns
(slot, tile of k), walks its share of the pixels, stores da and keeps the two column sums ds and dt, whose
slots a second kernel adds. Forming da on load instead would read two tensors nine times over. What is left
are the two products of any convolution: dx by owners of input pixels, who gather da through the mirrored
taps, and dw by (tap, slot, tile), with its slots added by the same kernel as those of ds and dt.

op: conv_bn_relu
schedule: partials_then_reduce, gather_transpose, swap_owner
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
def load_moved(ptr, p, down, across, c, pixels, H, W, C):
    """Channels c of the pixels p moved down and across, 0 outside their image."""
    i, j = p // W % H + down, p % W + across
    inside = (p < pixels) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    offs = (p + down * W + across)[:, None] * C + c[None, :]
    return tl.load(ptr + offs, mask=inside[:, None] & (c[None, :] < C), other=0.0)


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_kernel(
    x_ptr, w_ptr, s_ptr, t_ptr, y_ptr, a_ptr, pixels, H, W, C, K, R,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = load_moved(x_ptr, p, tap // R - R // 2, tap % R - R // 2, c, pixels, H, W, C)
            w = load_tile(w_ptr + tap * C * K, c, k, C, K)
            a = tl.dot(x, w, a, input_precision=PRECISION)
    s = tl.load(s_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    u = s[None, :] * a + t[None, :]
    store_tile(a_ptr, a, p, k, pixels, K)
    store_tile(y_ptr, tl.where(u > 0, u, 0.0), p, k, pixels, K)


def conv_forward(x, w, s, t):
    (N, H, W, C), (R, _, D, K), tiles = x.shape, w.shape, tiles_of(x)
    if R % 2 == 0 or D != C or s.shape != (K,) or t.shape != (K,):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)}, s {tuple(s.shape)} do not fit")
    y = torch.empty((N, H, W, K), device=x.device, dtype=x.dtype)
    a = torch.empty((N, H, W, K), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(N * H * W, tiles["BLOCK"]), triton.cdiv(K, tiles["BLOCK"]))
    conv_kernel[grid](x, w, s, t, y, a, N * H * W, H, W, C, K, R, **tiles)
    return y, a


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def conv_bn_relu(x, w, s, t):
    """x: (N, H, W, C); w: (R, R, C, K), R odd; s, t: (K); gives (N, H, W, K)."""
    return conv_forward(x.contiguous(), w.contiguous(), s.contiguous(), t.contiguous())[0]


def reference(x, w, s, t):
    x, w = x.permute(0, 3, 1, 2).contiguous(), w.permute(3, 2, 0, 1).contiguous()
    a = torch.nn.functional.conv2d(x, w, padding=w.shape[2] // 2)
    return torch.relu(s * a.permute(0, 2, 3, 1) + t)


SWEEP = [
    {"N": 8, "H": 56, "W": 56, "C": 64, "K": 128, "R": 3},
    {"N": 5, "H": 31, "W": 45, "C": 50, "K": 70, "R": 3},
]
SWEEP_CPU = [
    {"N": 1, "H": 6, "W": 7, "C": 16, "K": 16, "R": 3},
    {"N": 2, "H": 5, "W": 4, "C": 35, "K": 40, "R": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, H, W, C, K, R = (dims[name] for name in "NHWCKR")
    R += 1 - R % 2
    x = torch.randn(N, H, W, C, device=device, dtype=dtype)
    w = torch.randn(R, R, C, K, device=device, dtype=dtype) / (R * max(1, C) ** 0.5)
    s, t = (torch.randn(K, device=device, dtype=dtype) for _ in range(2))
    return x, w, s, t


# ---- backward ----

MAX_SLOTS = 32


@triton.jit
def epilogue_backward_kernel(
    a_ptr, s_ptr, t_ptr, dy_ptr, da_ptr, ds_part_ptr, dt_part_ptr, pixels, K,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    s = tl.load(s_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    ds = tl.zeros([BLOCK_P, BLOCK_K], dtype=tl.float32)
    dt = tl.zeros([BLOCK_P, BLOCK_K], dtype=tl.float32)
    for start in range(slot * BLOCK_P, pixels, tl.num_programs(0) * BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        a = load_tile(a_ptr, p, k, pixels, K)
        dy = load_tile(dy_ptr, p, k, pixels, K).to(tl.float32)
        du = tl.where(s[None, :] * a + t[None, :] > 0, dy, 0.0)
        store_tile(da_ptr, s[None, :] * du, p, k, pixels, K)
        ds += du * a
        dt += du
    tl.store(ds_part_ptr + slot * K + k, tl.sum(ds, axis=0), mask=k < K)
    tl.store(dt_part_ptr + slot * K + k, tl.sum(dt, axis=0), mask=k < K)


@triton.jit
def dx_kernel(
    da_ptr, w_ptr, dx_ptr, pixels, H, W, C, K, R, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for tap in range(R * R):
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            da = load_moved(da_ptr, p, R // 2 - tap // R, R // 2 - tap % R, k, pixels, H, W, K)
            w = load_tile(w_ptr + tap * C * K, c, k, C, K)
            dx = tl.dot(da, tl.trans(w), dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, p, c, pixels, C)


@triton.jit
def weight_parts_kernel(
    x_ptr, da_ptr, part_ptr, pixels, H, W, C, K, R, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(1)
    tiles = tl.cdiv(K, BLOCK)
    c = tl.program_id(2) // tiles * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(2) % tiles * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(slot * BLOCK, pixels, tl.num_programs(0) * BLOCK):
        p = start + tl.arange(0, BLOCK)
        x = load_moved(x_ptr, p, tap // R - R // 2, tap % R - R // 2, c, pixels, H, W, C)
        dw = tl.dot(tl.trans(x), load_tile(da_ptr, p, k, pixels, K), dw, input_precision=PRECISION)
    store_tile(part_ptr + (slot * R * R + tap) * C * K, dw, c, k, C, K)


@triton.jit
def add_slots_kernel(part_ptr, out_ptr, n, slots, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(part_ptr + slot * n + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=at < n)


def add_slots(part, like):
    out = torch.empty_like(like)
    n = out.numel()
    add_slots_kernel[(triton.cdiv(n, 256),)](part, out, n, part.shape[0], BLOCK=256)
    return out


class ConvBnRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, s, t):
        x, w, s, t = x.contiguous(), w.contiguous(), s.contiguous(), t.contiguous()
        y, a = conv_forward(x, w, s, t)
        ctx.save_for_backward(x, w, s, t, a)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, s, t, a = ctx.saved_tensors
        (N, H, W, C), (R, _, _, K), tiles = x.shape, w.shape, tiles_of(x)
        pixels, BLOCK, needs = N * H * W, tiles["BLOCK"], ctx.needs_input_grad
        row_tiles, sizes = triton.cdiv(pixels, BLOCK), (pixels, H, W, C, K, R)
        slots = min(row_tiles, MAX_SLOTS)
        da = torch.empty(a.shape, device=a.device, dtype=x.dtype)
        ds_part, dt_part = torch.empty((2, slots, K), device=a.device, dtype=torch.float32)
        epilogue_backward_kernel[(slots, triton.cdiv(K, 64))](
            a, s, t, dy.contiguous(), da, ds_part, dt_part, pixels, K, BLOCK_P=16, BLOCK_K=64
        )
        dx = dw = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(row_tiles, triton.cdiv(C, BLOCK))](da, w, dx, *sizes, **tiles)
        if needs[1]:
            part = torch.empty((slots, *w.shape), device=w.device, dtype=torch.float32)
            grid = (slots, R * R, triton.cdiv(C, BLOCK) * triton.cdiv(K, BLOCK))
            weight_parts_kernel[grid](x, da, part, *sizes, **tiles)
            dw = add_slots(part, w)
        ds = add_slots(ds_part, s) if needs[2] else None
        return dx, dw, ds, add_slots(dt_part, t) if needs[3] else None


def conv_bn_relu_autograd(x, w, s, t):
    return ConvBnRelu.apply(x, w, s, t)

"""Direct convolution of a picture with few channels, channels first: the first layer of an image network.

Forward    y[n, k, p] = b_k + sum over channels c and taps (r, q) of w[k, c, r, q] x[n, c, p + (r, q) - pad],
           R odd, pad = (R - 1) / 2, x = 0 outside
Backward   dx[n, c, i] = sum over k and taps of w[k, c, r, q] dy[n, k, i - (r, q) + pad];
           dw[k, c, r, q] = sum over n and p of dy[n, k, p] x[n, c, p + (r, q) - pad];
           db_k = sum over n and p of dy[n, k, p]

Forward schedule: with three channels a product would be padded to 16 and be nine tenths zeros. A program owns
(image and output channel, tile of pixels) and walks channels and taps with one number of w at a time; lanes
are pixels, x comes from cache for all but the first k.
Backward schedule: dx is the same walk over k and mirrored taps, owned by input pixels; in a first layer
nobody asks for it, and its launch is skipped. dw has C R R numbers for each k and a sum over all pixels of
all images. The program that owned a tile of y has its dy in registers: for each (c, r, q) it loads the
shifted tile of x, reduces the product to one number and adds that by an atomic to an fp32 buffer. Tiles are
large, so an address is hit once for a thousand pixels. db would be an address that all tiles of a channel
want at the same moment: each tile stores its sum as a part, and a second kernel adds them.

op: conv2d
schedule: gather_transpose, atomic_accumulate, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def load_moved(plane, p, down, across, H, W):
    """Pixels p of a plane, moved; 0 outside."""
    i, j = p // W + down, p % W + across
    inside = (p < H * W) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    return tl.load(plane + i * W + j, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def conv_kernel(x_ptr, w_ptr, b_ptr, y_ptr, C, K, H, W, R, BLOCK: tl.constexpr):
    n, k = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(b_ptr + k).to(tl.float32)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        for tap in range(R * R):
            w = tl.load(w_ptr + (k * C + c) * R * R + tap).to(tl.float32)
            y += w * load_moved(plane, p, tap // R - R // 2, tap % R - R // 2, H, W)
    tl.store(y_ptr + (n * K + k) * H * W + p, y.to(y_ptr.dtype.element_ty), mask=p < H * W)


@autodiff(inputs_require_grad=(0, 1, 2))
def conv2d(x, w, b):
    """x: (N, C, H, W); w: (K, C, R, R), R odd; b: (K); gives (N, K, H, W)."""
    (N, C, H, W), (K, D, R, _) = x.shape, w.shape
    if R % 2 == 0 or D != C or w.shape[3] != R or b.shape != (K,):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    y = torch.empty((N, K, H, W), device=x.device, dtype=x.dtype)
    grid = (N * K, triton.cdiv(H * W, BLOCK))
    conv_kernel[grid](x.contiguous(), w.contiguous(), b.contiguous(), y, C, K, H, W, R, BLOCK=BLOCK)
    return y


def reference(x, w, b):
    return torch.nn.functional.conv2d(x, w, b, padding=w.shape[2] // 2)


SWEEP = [
    {"N": 16, "C": 3, "K": 32, "H": 128, "W": 128, "R": 3},
    {"N": 5, "C": 1, "K": 17, "H": 131, "W": 90, "R": 5},
]
SWEEP_CPU = [
    {"N": 2, "C": 3, "K": 5, "H": 10, "W": 17, "R": 3},
    {"N": 1, "C": 2, "K": 3, "H": 33, "W": 35, "R": 1},
]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, K, H, W, R = (dims[name] for name in "NCKHWR")
    R = min(R + 1 - R % 2, 5)
    x = torch.randn(N, C, H, W, device=device, dtype=dtype)
    w = torch.randn(K, C, R, R, device=device, dtype=dtype) / (R * max(1, C) ** 0.5)
    return x, w, torch.randn(K, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def dx_kernel(dy_ptr, w_ptr, dx_ptr, C, K, H, W, R, BLOCK: tl.constexpr):
    n, c = tl.program_id(0).to(tl.int64) // C, tl.program_id(0) % C
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(K):
        plane = dy_ptr + (n * K + k) * H * W
        for tap in range(R * R):
            w = tl.load(w_ptr + (k * C + c) * R * R + tap).to(tl.float32)
            dx += w * load_moved(plane, p, R // 2 - tap // R, R // 2 - tap % R, H, W)
    tl.store(dx_ptr + (n * C + c) * H * W + p, dx.to(dx_ptr.dtype.element_ty), mask=p < H * W)


@triton.jit
def weight_kernel(x_ptr, dy_ptr, dw_ptr, db_part_ptr, C, K, H, W, R, BLOCK: tl.constexpr):
    n, k = tl.program_id(0).to(tl.int64) // K, tl.program_id(0) % K
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dy = load_moved(dy_ptr + (n * K + k) * H * W, p, 0, 0, H, W)
    for c in range(C):
        plane = x_ptr + (n * C + c) * H * W
        for tap in range(R * R):
            x = load_moved(plane, p, tap // R - R // 2, tap % R - R // 2, H, W)
            tl.atomic_add(dw_ptr + (k * C + c) * R * R + tap, tl.sum(dy * x, axis=0), sem="relaxed")
    tl.store(db_part_ptr + (n * tl.num_programs(1) + tl.program_id(1)) * K + k, tl.sum(dy, axis=0))


@triton.jit
def bias_sum_kernel(part_ptr, db_ptr, parts, K, BLOCK: tl.constexpr):
    k = tl.program_id(0)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        db += tl.load(part_ptr + i * K + k, mask=i < parts, other=0.0)
    tl.store(db_ptr + k, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty))


class Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.b_dtype = b.dtype
        return conv2d(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        (N, C, H, W), (K, _, R, _), dy = x.shape, w.shape, dy.contiguous()
        tiles, needs = triton.cdiv(H * W, BLOCK), ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(N * C, tiles)](dy, w, dx, C, K, H, W, R, BLOCK=BLOCK)
        if needs[1] or needs[2]:
            dw = torch.zeros(w.shape, device=w.device, dtype=torch.float32)
            part = torch.empty((N * tiles, K), device=w.device, dtype=torch.float32)
            weight_kernel[(N * K, tiles)](x, dy, dw, part, C, K, H, W, R, BLOCK=BLOCK)
            if needs[2]:
                db = torch.empty(K, device=w.device, dtype=ctx.b_dtype)
                bias_sum_kernel[(K,)](part, db, N * tiles, K, BLOCK=256)
        return dx, dw.to(w.dtype) if needs[1] else None, db


def conv2d_autograd(x, w, b):
    return Conv2d.apply(x, w, b)

"""1x1 convolution, channels first: a linear layer over the channels of every pixel, without a transpose.

Forward    y[n, k, p] = b_k + sum_c w[k, c] x[n, c, p] over the P = H W pixels p of image n
Backward   dx[n, c, p] = sum_k w[k, c] dy[n, k, p];
           dw[k, c] = sum_n sum_p dy[n, k, p] x[n, c, p],  db_k = sum_n sum_p dy[n, k, p]

Forward schedule: a program owns (image, tile of k, tile of pixels) and walks the channels. Pixels are what
lies side by side in memory, so they are the columns of every tile and w stands on the left.
Backward schedule: dx is the same product with w transposed on load, image by image. In dw the pixels are the
inner axis of both factors and the sum also goes over images: tiles of dw are few (K C numbers) and the sum is
long, so it is split over images. A program owns (slot, tile of dw), walks the pixels of images slot,
slot + G, ... and stores its part; a second kernel adds the G parts. db is the row sum of the dy that this
walk loads anyway: the programs of the first tile of c keep it as well.

op: conv1x1
schedule: swap_owner, partials_then_reduce
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
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_kernel(x_ptr, w_ptr, b_ptr, y_ptr, K, C, P, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, C, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr + n * C * P, c, p, C, P)
        y = tl.dot(load_tile(w_ptr, k, c, K, C), x, y, input_precision=PRECISION)
    y += tl.load(b_ptr + k, mask=k < K, other=0.0).to(tl.float32)[:, None]
    store_tile(y_ptr + n * K * P, y, k, p, K, P)


@autodiff(inputs_require_grad=(0, 1, 2))
def conv1x1(x, w, b):
    """x: (N, C, H, W); w: (K, C); b: (K); gives (N, K, H, W)."""
    x, (N, C, H, W), K = x.contiguous(), x.shape, w.shape[0]
    tiles = tiles_of(x)
    y = torch.empty((N, K, H, W), device=x.device, dtype=x.dtype)
    grid = (N, triton.cdiv(K, tiles["BLOCK"]), triton.cdiv(H * W, tiles["BLOCK"]))
    conv_kernel[grid](x, w.contiguous(), b.contiguous(), y, K, C, H * W, **tiles)
    return y


def reference(x, w, b):
    return torch.nn.functional.conv2d(x, w[:, :, None, None], b)


SWEEP = [
    {"N": 16, "C": 256, "K": 512, "H": 56, "W": 56},
    {"N": 33, "C": 100, "K": 130, "H": 37, "W": 41},
]
SWEEP_CPU = [{"N": 3, "C": 24, "K": 20, "H": 5, "W": 7}, {"N": 1, "C": 40, "K": 70, "H": 6, "W": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N, C, K = dims["N"], dims["C"], dims["K"]
    x = torch.randn(N, C, dims["H"], dims["W"], device=device, dtype=dtype)
    w = torch.randn(K, C, device=device, dtype=dtype) / max(1, C) ** 0.5
    return x, w, torch.randn(K, device=device, dtype=dtype)


# ---- backward ----

MAX_SLOTS = 16


@triton.jit
def dx_kernel(w_ptr, dy_ptr, dx_ptr, K, C, P, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr + n * K * P, k, p, K, P)
        dx = tl.dot(tl.trans(load_tile(w_ptr, k, c, K, C)), dy, dx, input_precision=PRECISION)
    store_tile(dx_ptr + n * C * P, dx, c, p, C, P)


@triton.jit
def weight_parts_kernel(
    x_ptr, dy_ptr, dw_part_ptr, db_part_ptr, N, G, K, C, P, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    slot = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for n in range(slot, N, G):
        for start in range(0, P, BLOCK):
            p = start + tl.arange(0, BLOCK)
            dy = load_tile(dy_ptr + n * K * P, k, p, K, P)
            x = load_tile(x_ptr + n * C * P, c, p, C, P)
            dw = tl.dot(dy, tl.trans(x), dw, input_precision=PRECISION)
            db += dy.to(tl.float32)
    store_tile(dw_part_ptr + slot * K * C, dw, k, c, K, C)
    if tl.program_id(2) == 0:
        tl.store(db_part_ptr + slot * K + k, tl.sum(db, axis=1), mask=k < K)


@triton.jit
def add_parts_kernel(part_ptr, out_ptr, n_out, G, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(G):
        acc += tl.load(part_ptr + slot * n_out + i, mask=i < n_out, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < n_out)


class Conv1x1(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        ctx.b_dtype = b.dtype
        return conv1x1(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        (N, C, H, W), K = x.shape, w.shape[0]
        tiles, needs = tiles_of(x), ctx.needs_input_grad
        BLOCK = tiles["BLOCK"]
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            grid = (N, triton.cdiv(C, BLOCK), triton.cdiv(H * W, BLOCK))
            dx_kernel[grid](w, dy, dx, K, C, H * W, **tiles)
        if needs[1] or needs[2]:
            G = min(N, MAX_SLOTS)
            dw_part = torch.empty((G, K, C), device=x.device, dtype=torch.float32)
            db_part = torch.empty((G, K), device=x.device, dtype=torch.float32)
            grid = (G, triton.cdiv(K, BLOCK), max(1, triton.cdiv(C, BLOCK)))
            weight_parts_kernel[grid](x, dy, dw_part, db_part, N, G, K, C, H * W, **tiles)
            if needs[1]:
                dw = torch.empty_like(w)
                add_parts_kernel[(triton.cdiv(K * C, 256),)](dw_part, dw, K * C, G, BLOCK=256)
            if needs[2]:
                db = torch.empty(K, device=x.device, dtype=ctx.b_dtype)
                add_parts_kernel[(triton.cdiv(K, 256),)](db_part, db, K, G, BLOCK=256)
        return dx, dw, db


def conv1x1_autograd(x, w, b):
    return Conv1x1.apply(x, w, b)

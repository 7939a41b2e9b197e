"""Linear layer with GELU that keeps nothing but its inputs; the preactivation is made again.

Forward    Z = X W^T + b,  Y = gelu(Z) = Z Phi(Z),   X (M, K), W (N, K), b (N)
Backward   dZ = dY * gelu'(Z),   gelu'(z) = Phi(z) + z phi(z)   (the normal distribution, its density);
           dX = dZ W,   dW = dZ^T X,   db = column sums of dZ

Forward schedule: a program owns a tile of Z, walks K, and stores gelu of it. Z, as large as Y, is not kept:
in an MLP it would be the largest tensor of the layer.
Backward schedule: X and W are there anyway, so one more product makes Z again, a third more arithmetic for
the backward. It must not be made by every tile of dX or dW that needs it: the owner of a tile of Z rebuilds
it once, turns it into dZ in the epilogue and stores that, and only then do two plain products read it. dZ
lives for the backward alone, where a saved Z would live from the forward on. The owner of a tile of dZ also
has its column sums in registers; they go to a slot a row of tiles, and db is the sum of the slots.

op: linear_act
schedule: recompute_from_stats, swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if x.dtype == torch.float32 else 64}


@triton.jit
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def product_tile(
    a_ptr, b_ptr, m, n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile (m, n) of A B, in float32."""
    acc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, m, k, M, K, stride_am, stride_ak)
        b = load_tile(b_ptr, k, n, K, N, stride_bk, stride_bn)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def preactivation(x_ptr, w_ptr, b_ptr, m, n, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    z = product_tile(x_ptr, w_ptr, m, n, M, N, K, K, 1, 1, K, PRECISION, BLOCK)
    return z + tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def linear_gelu_kernel(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = preactivation(x_ptr, w_ptr, b_ptr, m, n, M, N, K, PRECISION, BLOCK)
    store_tile(y_ptr, z * 0.5 * (1.0 + tl.erf(z * SQRT_HALF)), m, n, M, N)


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_gelu(x, w, b):
    """x: (M, K); w: (N, K); b: (N); gives (M, N)."""
    (M, K), N, tiles = x.shape, w.shape[0], tiling(x)
    if w.shape[1] != K or b.shape != (N,):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    linear_gelu_kernel[grid](x.contiguous(), w.contiguous(), b.contiguous(), y, M, N, K, **tiles)
    return y


def reference(x, w, b):
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))


SWEEP = [{"M": 8192, "K": 1024, "N": 4096}, {"M": 4095, "K": 768, "N": 3001}]
SWEEP_CPU = [{"M": 30, "K": 48, "N": 36}, {"M": 70, "K": 17, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype) / max(1, dims["K"]) ** 0.5
    return x, w, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def dz_kernel(
    x_ptr, w_ptr, b_ptr, dy_ptr, dz_ptr, slots_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = preactivation(x_ptr, w_ptr, b_ptr, m, n, M, N, K, PRECISION, BLOCK)
    slope = 0.5 * (1.0 + tl.erf(z * SQRT_HALF)) + z * INV_SQRT_2PI * tl.exp(-0.5 * z * z)
    dz = load_tile(dy_ptr, m, n, M, N, N, 1).to(tl.float32) * slope
    store_tile(dz_ptr, dz, m, n, M, N)
    tl.store(slots_ptr + tl.program_id(0).to(tl.int64) * N + n, tl.sum(dz, axis=0), mask=n < N)


@triton.jit
def bias_sum_kernel(slots_ptr, db_ptr, slots, N, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        db += tl.load(slots_ptr + slot * N + n, mask=n < N, other=0.0)
    tl.store(db_ptr + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = product_tile(
        a_ptr, b_ptr, m, n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, PRECISION, BLOCK
    )
    store_tile(c_ptr, c, m, n, M, N)


def product(a, b):
    """A B of any strided views, in a new contiguous tensor."""
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    product_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), **tiles)
    return c


class LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        ctx.save_for_backward(x, w, b)
        return linear_gelu(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w, b = ctx.saved_tensors
        dy, (M, K), N, tiles, needs = dy.contiguous(), x.shape, w.shape[0], tiling(x), ctx.needs_input_grad
        rows = triton.cdiv(M, tiles["BLOCK"])
        dz, slots = torch.empty_like(dy), torch.empty((rows, N), device=x.device, dtype=torch.float32)
        dz_kernel[(rows, triton.cdiv(N, tiles["BLOCK"]))](x, w, b, dy, dz, slots, M, N, K, **tiles)
        dx = product(dz, w) if needs[0] else None
        dw = product(dz.t(), x) if needs[1] else None
        db = None
        if needs[2]:
            db = torch.empty_like(b)
            bias_sum_kernel[(triton.cdiv(N, 64),)](slots, db, rows, N, BLOCK=64)
        return dx, dw, db


def linear_gelu_autograd(x, w, b):
    return LinearGelu.apply(x, w, b)

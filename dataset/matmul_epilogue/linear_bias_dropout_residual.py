"""The output projection of a transformer block: linear layer with bias, dropout, and the residual added.

Forward    Z = X W^T + b,  Y = R + Z m / (1 - p),  m the mask of a seed;   X (M, K), W (N, K), b (N)
Backward   G = dY m / (1 - p):   dX = G W,   dW = G^T X,   db = column sums of G,   dR = dY

Forward schedule: a program owns a tile of Y and walks K. In the epilogue it draws the mask from (seed, place
in Y), so that Z, mask and Z m are never in memory.
Backward schedule: both products need G. Each of their programs could draw the mask again as it loads dY, but
a number of G is loaded by as many programs as K has tiles, in both products, and a draw is some hundred
integer operations. As dR wants a copy of dY, one pass over dY is due anyhow: its programs, who own a column
tile and a part of the rows, store dR, draw the mask once, store G, and keep their part of db, which a small
kernel adds up. The two products that follow are plain ones, by one kernel that takes strides.

op: linear_dropout
schedule: index_or_seed_replay, partials_then_reduce, swap_owner
difficulty: 3
dtypes: fp32, fp16, bf16
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
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def dropped(z, seed, offs, p):
    return tl.where(tl.rand(seed, offs) >= p, z / (1 - p), 0.0)


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
def linear_dropout_kernel(
    x_ptr, w_ptr, b_ptr, res_ptr, y_ptr, M, N, K, p, seed, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = product_tile(x_ptr, w_ptr, m, n, M, N, K, K, 1, 1, K, PRECISION, BLOCK)
    z += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m[:, None] < M) & (n[None, :] < N)
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    y = tl.load(res_ptr + offs, mask=mask, other=0.0).to(tl.float32) + dropped(z, seed, offs, p)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_mask_kernel(mask_ptr, count, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + offs, dropped(1 - p, seed, offs, p).to(tl.int8), mask=offs < count)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def linear_dropout_residual(x, w, b, res, p, seed):
    """x: (M, K); w: (N, K); b: (N); res: (M, N); gives (M, N)."""
    (M, K), N, tiles = x.shape, w.shape[0], tiling(x)
    if w.shape[1] != K or b.shape != (N,) or res.shape != (M, N):
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and res {tuple(res.shape)} do not fit")
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    x, w, b, res = x.contiguous(), w.contiguous(), b.contiguous(), res.contiguous()
    y = torch.empty_like(res)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    linear_dropout_kernel[grid](x, w, b, res, y, M, N, K, p, seed, **tiles)
    return y


def reference(x, w, b, res, p, seed):
    mask = torch.empty(res.shape, device=x.device, dtype=torch.int8)
    keep_mask_kernel[(triton.cdiv(res.numel(), 512),)](mask, res.numel(), p, seed, BLOCK=512)
    return res + (x @ w.t() + b) * mask / (1 - p)


SWEEP = [{"M": 8192, "K": 4096, "N": 1024}, {"M": 4095, "K": 3000, "N": 750}]
SWEEP_CPU = [{"M": 28, "K": 32, "N": 45}, {"M": 135, "K": 17, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = dims["M"], dims["K"], dims["N"]
    x, res = (torch.randn(M, size, device=device, dtype=dtype) for size in (K, N))
    w = torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5
    return (x, w, torch.randn(N, device=device, dtype=dtype), res), {"p": 0.25, "seed": 17}


# ---- backward ----

PART = 128  # rows of one partial sum


@triton.jit
def mask_kernel(
    dy_ptr, dres_ptr, g_ptr, slots_ptr, M, N, p, seed,
    PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, PART, BLOCK_M):
        m = tl.program_id(0) * PART + start + tl.arange(0, BLOCK_M)
        mask = (m[:, None] < M) & (n[None, :] < N)
        offs = m[:, None].to(tl.int64) * N + n[None, :]
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        g = dropped(dy.to(tl.float32), seed, offs, p)
        tl.store(dres_ptr + offs, dy, mask=mask)
        tl.store(g_ptr + offs, g.to(g_ptr.dtype.element_ty), mask=mask)
        db += g
    tl.store(slots_ptr + tl.program_id(0).to(tl.int64) * N + n, tl.sum(db, axis=0), mask=n < N)


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
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c_ptr + offs, c.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def product(a, b):
    """A B of any strided views, in a new contiguous tensor."""
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    product_kernel[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), **tiles)
    return c


class LinearDropoutResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, res, p, seed):
        ctx.save_for_backward(x, w)
        ctx.p, ctx.seed, ctx.b_dtype = p, seed, b.dtype
        return linear_dropout_residual(x, w, b, res, p, seed)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy, (M, N), needs = dy.contiguous(), dy.shape, ctx.needs_input_grad
        parts = triton.cdiv(M, PART)
        dres, g = torch.empty_like(dy), torch.empty_like(dy)
        slots = torch.empty((parts, N), device=dy.device, dtype=torch.float32)
        mask_kernel[(parts, triton.cdiv(N, 64))](
            dy, dres, g, slots, M, N, ctx.p, ctx.seed, PART=PART, BLOCK_M=32, BLOCK_N=64
        )
        dx = dw = db = None
        if needs[0]:
            dx = product(g, w)
        if needs[1]:
            dw = product(g.t(), x)
        if needs[2]:
            db = torch.empty(N, device=dy.device, dtype=ctx.b_dtype)
            bias_sum_kernel[(triton.cdiv(N, 64),)](slots, db, parts, N, BLOCK=64)
        return dx, dw, db, dres if needs[3] else None, None, None


def linear_dropout_residual_autograd(x, w, b, res, p, seed):
    return LinearDropoutResidual.apply(x, w, b, res, p, seed)

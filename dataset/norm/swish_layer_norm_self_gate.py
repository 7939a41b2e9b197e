"""A row gated by its own layer norm, for narrow rows.

Forward    xhat = (x - mu) rstd,   v = xhat w + b,   y = x s,   s = sigmoid(v)
Backward   dv = dy x s (1 - s),   and with g = dv w:   dx = dy s + rstd (g - mean g - xhat mean(g xhat)),
           dw = sum over rows of dv xhat,   db = sum over rows of dv

Forward schedule: rows are narrow (some hundred numbers of a recommender's features), so a program owns
several of them as one tile, rows by columns, and every reduction along a row stays inside it. mu and rstd are
kept.
Backward schedule: x reaches y by two routes, as the gated number and through the gate; both end in the same
lane of the same program, and are added before the one store. The program walks tiles of rows pid, pid + G,
... and adds dv xhat and dv lane by lane into two tiles; it sums those over their rows once, at its end, not
once a tile, so the walk has only the reductions along rows that dx needs. G parts are added by a second
kernel.

op: swish_layer_norm
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(N):
    """Rows of one tile: a few thousand numbers together."""
    BLOCK_N = triton.next_power_of_2(N)
    return {"BLOCK_M": max(1, min(32, 2048 // BLOCK_N)), "BLOCK_N": BLOCK_N}


@triton.jit
def load_tile(ptr, m, n, M, N):
    mask = (m[:, None] < M) & (n[None, :] < N)
    return tl.load(ptr + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def swish_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m, n = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, m, n, M, N)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    mu = tl.sum(x, axis=1) / N
    centred = tl.where(n[None, :] < N, x - mu[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / N + eps)
    y = x * tl.sigmoid(centred * rstd[:, None] * w[None, :] + b[None, :])
    tl.store(mu_ptr + m, mu, mask=m < M)
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def swish_layer_norm_forward(x, w, b, eps):
    M, N = x.shape
    if N > 2048:
        raise ValueError(f"a row of {N} is too wide for a tile of several rows")
    tiles, y = tiling(N), torch.empty_like(x)
    mu, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    swish_norm_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, w, b, y, mu, rstd, M, N, eps, **tiles)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def swish_layer_norm(x, w, b, eps=1e-5):
    """x: (M, N), N at most 2048; w, b: (N)."""
    return swish_layer_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-5):
    return x * torch.sigmoid(torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, eps))


SWEEP = [{"M": 262144, "N": 128}, {"M": 65537, "N": 200}]
SWEEP_CPU = [{"M": 26, "N": 47}, {"M": 150, "N": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w, b = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, 1 + 0.2 * w, b


# ---- backward ----

MAX_GROUPS = 512  # some four programs a multiprocessor


@triton.jit
def swish_norm_backward_kernel(
    x_ptr, w_ptr, b_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, parts_ptr, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid, G = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(pid * BLOCK_M, M, G * BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = load_tile(x_ptr, m, n, M, N)
        dy = load_tile(dy_ptr, m, n, M, N)
        mu = tl.load(mu_ptr + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
        xhat = tl.where(n[None, :] < N, (x - mu) * rstd, 0.0)
        s = tl.sigmoid(xhat * w + b)
        dv = dy * x * s * (1 - s)
        g = dv * w
        c0 = tl.sum(g, axis=1)[:, None] / N
        c1 = tl.sum(g * xhat, axis=1)[:, None] / N
        dx = dy * s + rstd * (g - c0 - xhat * c1)
        mask = (m[:, None] < M) & (n[None, :] < N)
        tl.store(dx_ptr + m[:, None] * N + n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dv * xhat
        db += dv
    tl.store(parts_ptr + pid * N + n, tl.sum(dw, axis=0), mask=n < N)
    tl.store(parts_ptr + (G + pid) * N + n, tl.sum(db, axis=0), mask=n < N)


@triton.jit
def column_sum_kernel(parts_ptr, dw_ptr, db_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        dw += load_tile(parts_ptr, part, n, G, N)
        db += load_tile(parts_ptr + G * N, part, n, G, N)
    tl.store(dw_ptr + n, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=n < N)
    tl.store(db_ptr + n, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=n < N)


class SwishLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = swish_layer_norm_forward(x, w, b, eps)
        ctx.save_for_backward(x, w, b, mu, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, b, mu, rstd = ctx.saved_tensors
        (M, N), needs = x.shape, ctx.needs_input_grad
        tiles = tiling(N)
        G = min(triton.cdiv(M, tiles["BLOCK_M"]), MAX_GROUPS)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
        parts = torch.empty((2, G, N), device=x.device, dtype=torch.float32)
        swish_norm_backward_kernel[(G,)](x, w, b, mu, rstd, dy.contiguous(), dx, parts, M, N, **tiles)
        if needs[1] or needs[2]:
            column_sum_kernel[(triton.cdiv(N, 32),)](parts, dw, db, G, N, BLOCK_G=64, BLOCK_N=32)
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


def swish_layer_norm_autograd(x, w, b, eps=1e-5):
    return SwishLayerNorm.apply(x, w, b, eps)

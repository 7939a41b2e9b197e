"""Layer norm whose parameters' gradients belong to owners of columns.

Forward    xhat = (x - mu) rstd,   y = xhat w + b;   x (M, N), w, b (N)
Backward   with g = dy w:   dx = rstd (g - mean g - xhat mean(g xhat)),
           dw = sum over rows of dy xhat,   db = sum over rows of dy

Forward schedule: a program owns a tile of rows, all their columns, and saves mu and rstd.
Backward schedule: dx has the forward's owners. dw and db sum over rows, that is over those owners, and are
given owners of their own: a program has a tile of columns and walks all rows, making xhat again from x and
two numbers a row, and stores once. Nothing passes between programs: no slots, no second sum, no atomics, the
order of the additions does not depend on the size of the GPU, and a kernel whose gradient nobody wants is not
launched. The price is that x and dy are read twice; it suits few rows and many columns, where partial rows
would cost as much as the tensor itself.

op: layer_norm
schedule: row_reduce_correct, swap_owner, recompute_from_stats
difficulty: 2
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
    BLOCK_M = max(1, min(16, 2048 // BLOCK_N))
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": min(16, max(4, BLOCK_N // 512))}


@triton.jit
def load_tile(ptr, m, n, M, N):
    mask = (m[:, None] < M) & (n[None, :] < N)
    return tl.load(ptr + m[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, m, n, M, N):
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(ptr + m[:, None].to(tl.int64) * N + n[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    x = load_tile(x_ptr, m, n, M, N)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    mu = tl.sum(x, axis=1) / N
    centred = tl.where(n[None, :] < N, x - mu[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / N + eps)
    tl.store(mu_ptr + m, mu, mask=m < M)
    tl.store(rstd_ptr + m, rstd, mask=m < M)
    store_tile(y_ptr, centred * rstd[:, None] * w[None, :] + b[None, :], m, n, M, N)


def layer_norm_forward(x, w, b, eps):
    M, N = x.shape
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    tiles, y = tiling(N), torch.empty_like(x)
    mu, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    layer_norm_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, w, b, y, mu, rstd, M, N, eps, **tiles)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm(x, w, b, eps=1e-5):
    """x: (M, N); w, b: (N)."""
    return layer_norm_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, eps)


SWEEP = [{"M": 1024, "N": 12288}, {"M": 2049, "N": 5000}]
SWEEP_CPU = [{"M": 53, "N": 40}, {"M": 9, "N": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 0.5 + 2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w, b = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, 1 + 0.2 * w, b


# ---- backward ----


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mu = tl.load(mu_ptr + m, mask=m < M, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
    xhat = tl.where(n[None, :] < N, (load_tile(x_ptr, m, n, M, N) - mu) * rstd, 0.0)
    w = tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    g = load_tile(dy_ptr, m, n, M, N) * w[None, :]
    c0 = tl.sum(g, axis=1)[:, None] / N
    c1 = tl.sum(g * xhat, axis=1)[:, None] / N
    store_tile(dx_ptr, rstd * (g - c0 - xhat * c1), m, n, M, N)


@triton.jit
def dw_db_kernel(
    x_ptr, mu_ptr, rstd_ptr, dy_ptr, dw_ptr, db_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        mu = tl.load(mu_ptr + m, mask=m < M, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
        dy = load_tile(dy_ptr, m, n, M, N)
        dw += dy * (load_tile(x_ptr, m, n, M, N) - mu) * rstd
        db += dy
    tl.store(dw_ptr + n, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=n < N)
    tl.store(db_ptr + n, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=n < N)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w = x.contiguous(), w.contiguous()
        y, mu, rstd = layer_norm_forward(x, w, b.contiguous(), eps)
        ctx.save_for_backward(x, w, mu, rstd)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        dy, (M, N), tiles, needs = dy.contiguous(), x.shape, tiling(x.shape[1]), ctx.needs_input_grad
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](x, w, mu, rstd, dy, dx, M, N, **tiles)
        if needs[1] or needs[2]:
            dw, db = torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
            dw_db_kernel[(triton.cdiv(N, 32),)](x, mu, rstd, dy, dw, db, M, N, BLOCK_M=32, BLOCK_N=32)
        return dx, dw if needs[1] else None, db if needs[2] else None, None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)

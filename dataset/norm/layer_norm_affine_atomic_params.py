"""Layer norm whose parameters' gradients are added by atomics, in a single launch.

Forward    xhat = (x - mu) rstd,   y = xhat w + b
Backward   with g = dy w:   dx = rstd (g - mean g - xhat mean(g xhat)),
           dw = sum over rows of dy xhat,   db = sum over rows of dy

Forward schedule: a program owns a tile of rows with all their columns and saves mu and rstd.
Backward schedule: the same owner writes dx. Its rows' share of dw and db is summed over the tile in registers
first, and then added, one atomic a column, to float32 zeros: the tile's height divides the number of atomics,
which all programs aim at the same 2 N addresses. No second kernel, no buffer that grows with the number of
programs, and no loop: a program has one tile and ends, so there is no number of groups to choose. In exchange
the additions come in any order, and where N is small all programs queue for few addresses; then parts in a
buffer are better.

op: layer_norm
schedule: row_reduce_correct, atomic_accumulate, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(N):
    """Rows of one tile, and warps enough to hold it in registers."""
    BLOCK_N = triton.next_power_of_2(N)
    BLOCK_M = max(1, min(16, 8192 // BLOCK_N))
    return {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": min(16, max(4, BLOCK_M * BLOCK_N // 512))}


@triton.jit
def load_tile(ptr, m, n, M, N):
    mask = (m[:, None] < M) & (n[None, :] < N)
    return tl.load(ptr + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, value, m, n, M, N):
    mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(ptr + m[:, None] * N + n[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, M, N, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    m, n = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
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


SWEEP = [{"M": 8192, "N": 4096}, {"M": 16387, "N": 1000}]
SWEEP_CPU = [{"M": 29, "N": 96}, {"M": 70, "N": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = 0.5 + 2 * torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w, b = (torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, 1 + 0.2 * w, b


# ---- backward ----


@triton.jit
def layer_norm_backward_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, M, N, WANT_PARAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    mu = tl.load(mu_ptr + m, mask=m < M, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + m, mask=m < M, other=0.0)[:, None]
    dy = load_tile(dy_ptr, m, n, M, N)
    xhat = tl.where(n[None, :] < N, (load_tile(x_ptr, m, n, M, N) - mu) * rstd, 0.0)
    g = dy * tl.load(w_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    c0 = tl.sum(g, axis=1)[:, None] / N
    c1 = tl.sum(g * xhat, axis=1)[:, None] / N
    store_tile(dx_ptr, rstd * (g - c0 - xhat * c1), m, n, M, N)
    if WANT_PARAMS:
        tl.atomic_add(dw_ptr + n, tl.sum(dy * xhat, axis=0), mask=n < N, sem="relaxed")
        tl.atomic_add(db_ptr + n, tl.sum(dy, axis=0), mask=n < N, sem="relaxed")


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
        (M, N), tiles, needs = x.shape, tiling(x.shape[1]), ctx.needs_input_grad
        dx = torch.empty_like(x)
        dw, db = (torch.zeros(N, device=x.device, dtype=torch.float32) for _ in range(2))
        layer_norm_backward_kernel[(triton.cdiv(M, tiles["BLOCK_M"]),)](
            x, w, mu, rstd, dy.contiguous(), dx, dw, db, M, N, WANT_PARAMS=needs[1] or needs[2], **tiles
        )
        dw = dw.to(w.dtype) if needs[1] else None
        return dx if needs[0] else None, dw, db.to(ctx.b_dtype) if needs[2] else None, None


def layer_norm_autograd(x, w, b, eps=1e-5):
    return LayerNorm.apply(x, w, b, eps)

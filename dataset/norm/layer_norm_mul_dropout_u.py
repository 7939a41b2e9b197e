"""Layer norm, times a gate, dropout: the output side of a pointwise attention without softmax.

Forward    v = (x - mu) rstd w + b,   y = v u m / (1 - p),   m the mask of a seed
Backward   h = dy m / (1 - p):   du = h v,   dv = h u,   and with g = dv w, xhat = (x - mu) rstd:
           dx = rstd (g - mean g - xhat mean(g xhat)),   dw = sum over rows of dv xhat,   db = of dv

Forward schedule: a program owns a row, normalises it, multiplies it with u and draws the mask by (seed,
place); v and the mask are never in memory, mu and rstd are kept, two numbers a row.
Backward schedule: G programs walk the rows pid, pid + G, ... A row's owner rebuilds xhat and v from x and two
numbers, draws the mask again, and has both factors of the product at hand: du and dx leave in the same pass
that read x, u and dy. Unfused, dropout, product and norm each write and read a row in between. dw and db stay
in registers over a program's rows, and G parts are added by a second kernel.

op: layer_norm_mul
schedule: row_reduce_correct, partials_then_reduce, index_or_seed_replay, recompute_from_stats
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def dropped(x, seed, offs, p):
    return tl.where(tl.rand(seed, offs) >= p, x / (1 - p), 0.0)


@triton.jit
def norm_mul_kernel(
    x_ptr, u_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, N, p, seed, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    offs = row * N + cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    mu = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mu, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + eps)
    y = dropped((centred * rstd * w + b) * u, seed, offs, p)
    tl.store(mu_ptr + row, mu)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_mask_kernel(mask_ptr, count, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(mask_ptr + offs, dropped(1 - p, seed, offs, p).to(tl.int8), mask=offs < count)


def tile_of(N):
    """A whole row in one tile, and warps enough to hold it in registers."""
    BLOCK = triton.next_power_of_2(N)
    return {"BLOCK": BLOCK, "num_warps": min(16, max(4, BLOCK // 512))}


def norm_mul_forward(x, u, w, b, p, seed, eps):
    if x.shape != u.shape:
        raise ValueError(f"x {tuple(x.shape)} and u {tuple(u.shape)} must have one shape")
    if not 0 <= p < 1:
        raise ValueError(f"p = {p} is no probability below 1")
    M, N = x.shape
    if N > 16384:
        raise ValueError(f"a row of {N} does not fit one tile")
    y = torch.empty_like(x)
    mu, rstd = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))
    norm_mul_kernel[(M,)](x, u, w, b, y, mu, rstd, N, p, seed, eps, **tile_of(N))
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def layer_norm_mul_dropout(x, u, w, b, p, seed, eps=1e-5):
    """x, u: (M, N); w, b: (N)."""
    tensors = [t.contiguous() for t in (x, u, w, b)]
    return norm_mul_forward(*tensors, p, seed, eps)[0]


def reference(x, u, w, b, p, seed, eps=1e-5):
    mask = torch.empty(x.shape, device=x.device, dtype=torch.int8)
    keep_mask_kernel[(triton.cdiv(x.numel(), 512),)](mask, x.numel(), p, seed, BLOCK=512)
    return torch.nn.functional.layer_norm(x, (x.shape[1],), w, b, eps) * u * mask / (1 - p)


SWEEP = [{"M": 16384, "N": 2048}, {"M": 8191, "N": 1000}]
SWEEP_CPU = [{"M": 24, "N": 55}, {"M": 135, "N": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    x, u = (torch.randn(M, N, device=device, dtype=dtype) for _ in range(2))
    w, b = (torch.randn(N, device=device, dtype=dtype) for _ in range(2))
    return (x, u, 1 + 0.2 * w, b), {"p": 0.25, "seed": 5}


# ---- backward ----

MAX_GROUPS = 256  # about two programs a multiprocessor


@triton.jit
def norm_mul_backward_kernel(
    x_ptr, u_ptr, w_ptr, b_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, du_ptr, parts_ptr, M, N, G, p, seed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(pid, M, G):
        offs = row * N + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        h = dropped(tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32), seed, offs, p)
        rstd = tl.load(rstd_ptr + row)
        xhat = tl.where(mask, (x - tl.load(mu_ptr + row)) * rstd, 0.0)
        dv = h * u
        g = dv * w
        dx = rstd * (g - tl.sum(g, axis=0) / N - xhat * (tl.sum(g * xhat, axis=0) / N))
        tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        tl.store(du_ptr + offs, (h * (xhat * w + b)).to(du_ptr.dtype.element_ty), mask=mask)
        dw += dv * xhat
        db += dv
    tl.store(parts_ptr + pid * N + cols, dw, mask=mask)
    tl.store(parts_ptr + (G + pid) * N + cols, db, mask=mask)


@triton.jit
def column_sum_kernel(parts_ptr, dw_ptr, db_ptr, G, N, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        part = start + tl.arange(0, BLOCK_G)
        mask = (part[:, None] < G) & (cols[None, :] < N)
        dw += tl.load(parts_ptr + part[:, None] * N + cols[None, :], mask=mask, other=0.0)
        db += tl.load(parts_ptr + (G + part[:, None]) * N + cols[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + cols, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=cols < N)
    tl.store(db_ptr + cols, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=cols < N)


class LayerNormMulDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, u, w, b, p, seed, eps):
        x, u, w, b = (t.contiguous() for t in (x, u, w, b))
        y, mu, rstd = norm_mul_forward(x, u, w, b, p, seed, eps)
        ctx.save_for_backward(x, u, w, b, mu, rstd)
        ctx.p, ctx.seed = p, seed
        return y

    @staticmethod
    def backward(ctx, dy):
        x, u, w, b, mu, rstd = ctx.saved_tensors
        (M, N), needs = x.shape, ctx.needs_input_grad
        G = min(M, MAX_GROUPS)
        grads = tuple(torch.empty_like(t) for t in (x, u, w, b))
        parts = torch.empty((2, G, N), device=x.device, dtype=torch.float32)
        norm_mul_backward_kernel[(G,)](
            x, u, w, b, mu, rstd, dy.contiguous(), grads[0], grads[1], parts,
            M, N, G, ctx.p, ctx.seed, **tile_of(N),
        )  # fmt: skip
        if needs[2] or needs[3]:
            column_sum_kernel[(triton.cdiv(N, 64),)](parts, grads[2], grads[3], G, N, BLOCK_G=32, BLOCK_N=64)
        return *(g if needed else None for g, needed in zip(grads, needs, strict=False)), None, None, None


def layer_norm_mul_dropout_autograd(x, u, w, b, p, seed, eps=1e-5):
    return LayerNormMulDropout.apply(x, u, w, b, p, seed, eps)

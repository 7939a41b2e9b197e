"""Layer norm over the channels of each pixel, with the channels first: (N, C, pixels).

Forward    xhat = (x - mu) rstd over the C channels of a pixel,  y = xhat w_c + b_c
Backward   with g = w dy:  dx = rstd (g - c0 - xhat c1),  c0 = mean_c g,  c1 = mean_c g xhat;
           dw_c = sum over samples and pixels of dy xhat,  db_c = the same of dy

Forward schedule: the channels of one pixel are P numbers apart, so a program owns a tile of neighbouring
pixels and walks the channels in tiles of channels by pixels, each row of which is contiguous: mean, squares,
output. No transposed copy of x is made.
Backward schedule: the same owner walks the channels twice. The first walk sums c0 and c1 down the tile, and,
as it holds dy and xhat, their sums across it too: these are this program's parts of db and dw, C numbers
each, stored once. The second writes dx, mostly from L2. A second kernel adds the parts of all pixel tiles.
Tiles of 64 pixels keep those parts at 2 C numbers for every 64 C that are read.

op: layer_norm_2d
schedule: row_reduce_correct, partials_then_reduce, recompute_from_stats
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_C": 32, "BLOCK_P": 64}


@triton.jit
def load_tile(ptr, n, c, p, C, P):
    mask = (c[:, None] < C) & (p[None, :] < P)
    return tl.load(ptr + (n * C + c[:, None]) * P + p[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def layer_norm_2d_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mu_ptr, rstd_ptr, C, P, eps, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        total += load_tile(x_ptr, n, start + tl.arange(0, BLOCK_C), p, C, P)
    mu = tl.sum(total, axis=0) / C
    squares = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        centred = tl.where(c[:, None] < C, load_tile(x_ptr, n, c, p, C, P) - mu[None, :], 0.0)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / C + eps)
    tl.store(mu_ptr + n * P + p, mu, mask=p < P)
    tl.store(rstd_ptr + n * P + p, rstd, mask=p < P)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        xhat = (load_tile(x_ptr, n, c, p, C, P) - mu[None, :]) * rstd[None, :]
        y = xhat * w[:, None] + b[:, None]
        mask = (c[:, None] < C) & (p[None, :] < P)
        tl.store(y_ptr + (n * C + c[:, None]) * P + p[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def layer_norm_2d_forward(x, w, b, eps):
    N, C, P = x.shape
    y = torch.empty_like(x)
    mu, rstd = (torch.empty((N, P), device=x.device, dtype=torch.float32) for _ in range(2))
    layer_norm_2d_kernel[(N, triton.cdiv(P, TILE["BLOCK_P"]))](x, w, b, y, mu, rstd, C, P, eps, **TILE)
    return y, mu, rstd


@autodiff(inputs_require_grad=(0, 1, 2))
def layer_norm_2d(x, w, b, eps=1e-6):
    """x: (N, C, pixels); w, b: (C)."""
    return layer_norm_2d_forward(x.contiguous(), w.contiguous(), b.contiguous(), eps)[0]


def reference(x, w, b, eps=1e-6):
    centred = x - x.mean(1, keepdim=True)
    xhat = centred * torch.rsqrt(centred.pow(2).mean(1, keepdim=True) + eps)
    return xhat * w[:, None] + b[:, None]


SWEEP = [{"N": 32, "C": 96, "P": 3136}, {"N": 3, "C": 257, "P": 4097}]
SWEEP_CPU = [{"N": 2, "C": 12, "P": 35}, {"N": 1, "C": 70, "P": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    C = dims["C"]
    x = 0.5 + 2 * torch.randn(dims["N"], C, dims["P"], device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(C, device=device, dtype=dtype)
    return x, w, torch.randn(C, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def layer_norm_2d_backward_kernel(
    x_ptr, w_ptr, mu_ptr, rstd_ptr, dy_ptr, dx_ptr, dw_part, db_part, C, P,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    own = (n * tl.num_programs(1) + tl.program_id(1)) * C
    mu = tl.load(mu_ptr + n * P + p, mask=p < P, other=0.0)
    rstd = tl.load(rstd_ptr + n * P + p, mask=p < P, other=0.0)
    c0 = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    c1 = tl.zeros([BLOCK_C, BLOCK_P], dtype=tl.float32)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        xhat = (load_tile(x_ptr, n, c, p, C, P) - mu[None, :]) * rstd[None, :]
        dy = load_tile(dy_ptr, n, c, p, C, P)
        tl.store(db_part + own + c, tl.sum(dy, axis=1), mask=c < C)
        tl.store(dw_part + own + c, tl.sum(dy * xhat, axis=1), mask=c < C)
        c0 += w[:, None] * dy
        c1 += w[:, None] * dy * xhat
    mean0 = tl.sum(c0, axis=0) / C
    mean1 = tl.sum(c1, axis=0) / C
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + c, mask=c < C, other=0.0).to(tl.float32)
        xhat = (load_tile(x_ptr, n, c, p, C, P) - mu[None, :]) * rstd[None, :]
        g = w[:, None] * load_tile(dy_ptr, n, c, p, C, P)
        dx = rstd[None, :] * (g - mean0[None, :] - xhat * mean1[None, :])
        mask = (c[:, None] < C) & (p[None, :] < P)
        tl.store(dx_ptr + (n * C + c[:, None]) * P + p[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def parameter_sum_kernel(
    dw_part, db_part, dw_ptr, db_ptr, parts, C, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    dw = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    db = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for start in range(0, parts, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        mask = (r[:, None] < parts) & (c[None, :] < C)
        dw += tl.load(dw_part + r[:, None] * C + c[None, :], mask=mask, other=0.0)
        db += tl.load(db_part + r[:, None] * C + c[None, :], mask=mask, other=0.0)
    tl.store(dw_ptr + c, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=c < C)
    tl.store(db_ptr + c, tl.sum(db, axis=0).to(db_ptr.dtype.element_ty), mask=c < C)


class LayerNorm2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
        y, mu, rstd = layer_norm_2d_forward(x, w, b, eps)
        ctx.save_for_backward(x, w, mu, rstd)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, mu, rstd = ctx.saved_tensors
        N, C, P = x.shape
        tiles = triton.cdiv(P, TILE["BLOCK_P"])
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w, dtype=ctx.b_dtype)
        part = torch.empty((2, N * tiles, C), device=x.device, dtype=torch.float32)
        layer_norm_2d_backward_kernel[(N, tiles)](x, w, mu, rstd, dy.contiguous(), dx, *part, C, P, **TILE)
        needs = ctx.needs_input_grad
        if needs[1] or needs[2]:
            grid = (triton.cdiv(C, 32),)
            parameter_sum_kernel[grid](*part, dw, db, N * tiles, C, BLOCK_R=64, BLOCK_C=32)
        return dx if needs[0] else None, dw if needs[1] else None, db if needs[2] else None, None


def layer_norm_2d_autograd(x, w, b, eps=1e-6):
    return LayerNorm2d.apply(x, w, b, eps)

"""Bilinear layer: every output is a form of two vectors, as in biaffine scoring of pairs.

Forward    y_nk = sum_ij x_ni W_kij z_nj + c_k,   x (M, I), z (M, J), W (K, I, J), c (K)
Backward   dx_ni = sum_kj dy_nk W_kij z_nj,   dz_nj = sum_ki dy_nk W_kij x_ni,
           dW_kij = sum_n dy_nk x_ni z_nj,   dc_k = sum_n dy_nk

Forward schedule: a program owns (tile of rows, k): it makes tiles of X W_k by dots, and contracts each at
once with its tile of z, a row sum. X W_k, of M K J numbers, is never stored.
Backward schedule: in every gradient dy_nk scales a row of one factor, so it goes into that factor's tile on
load, and what is left are plain dots. dx's owner, (tile of rows, tile of i), walks k and j with one
accumulator for all of K; dz is the same kernel with the roles of x and z exchanged and W's strides with them.
dW's owner, a tile of one W_k, walks the rows: (dy_k x)^T z. That is K products of full size, no way around
it, as dW has K times the numbers of one. dc needs no product, one pass over dy by owners of k.

op: bilinear
schedule: swap_owner
difficulty: 4
dtypes: fp32, bf16
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
def bilinear_kernel(
    x_ptr, z_ptr, w_ptr, c_ptr, y_ptr, M, I, J, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1).to(tl.int64)
    y = tl.zeros([BLOCK], dtype=tl.float32) + tl.load(c_ptr + k).to(tl.float32)
    for j_start in range(0, J, BLOCK):
        j = j_start + tl.arange(0, BLOCK)
        xw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        for i_start in range(0, I, BLOCK):
            i = i_start + tl.arange(0, BLOCK)
            w = load_tile(w_ptr + k * I * J, i, j, I, J, J, 1)
            xw = tl.dot(load_tile(x_ptr, n, i, M, I, I, 1), w, xw, input_precision=PRECISION)
        y += tl.sum(xw * load_tile(z_ptr, n, j, M, J, J, 1).to(tl.float32), axis=1)
    tl.store(y_ptr + n.to(tl.int64) * K + k, y.to(y_ptr.dtype.element_ty), mask=n < M)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def bilinear(x, z, w, c):
    """x: (M, I); z: (M, J); w: (K, I, J); c: (K); gives (M, K)."""
    (M, I), (K, _, J), tiles = x.shape, w.shape, tiling(x)
    if z.shape != (M, J) or w.shape[1] != I or c.shape != (K,):
        raise ValueError(f"x {tuple(x.shape)}, z {tuple(z.shape)} and w {tuple(w.shape)} do not fit")
    y = torch.empty((M, K), device=x.device, dtype=x.dtype)
    tensors = [t.contiguous() for t in (x, z, w, c)]
    bilinear_kernel[(triton.cdiv(M, tiles["BLOCK"]), K)](*tensors, y, M, I, J, K, **tiles)
    return y


def reference(x, z, w, c):
    return torch.einsum("nkj,nj->nk", torch.einsum("ni,kij->nkj", x, w), z) + c


SWEEP = [{"M": 8192, "I": 256, "J": 256, "K": 40}, {"M": 4099, "I": 150, "J": 200, "K": 7}]
SWEEP_CPU = [{"M": 29, "I": 16, "J": 20, "K": 5}, {"M": 35, "I": 33, "J": 9, "K": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, I, J, K = (dims[name] for name in ("M", "I", "J", "K"))
    x, z = (torch.randn(M, size, device=device, dtype=dtype) for size in (I, J))
    w = torch.randn(K, I, J, device=device, dtype=dtype) / max(1, I * J) ** 0.5
    return x, z, w, torch.randn(K, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_scaled(ptr, dy_ptr, n, cols, k, M, C, K):
    """A tile of rows n, each times dy_nk."""
    x = load_tile(ptr, n, cols, M, C, C, 1)
    dy = tl.load(dy_ptr + n.to(tl.int64) * K + k, mask=n < M, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * dy[:, None]).to(x.dtype)


@triton.jit
def factor_kernel(
    other_ptr, w_ptr, dy_ptr, grad_ptr, M, OWN, OTHER, K, stride_wk, stride_other, stride_own,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient (M, OWN) of one vector from the other, (M, OTHER)."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for k in range(K):
        for start in range(0, OTHER, BLOCK):
            j = start + tl.arange(0, BLOCK)
            other = load_scaled(other_ptr, dy_ptr, n, j, k, M, OTHER, K)
            w = load_tile(w_ptr, j, i, OTHER, OWN, stride_other, stride_own)
            grad = tl.dot(other, w, grad, input_precision=PRECISION)
        w_ptr += stride_wk
    mask = (n[:, None] < M) & (i[None, :] < OWN)
    offs = n[:, None].to(tl.int64) * OWN + i[None, :]
    tl.store(grad_ptr + offs, grad.to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dw_kernel(x_ptr, z_ptr, dy_ptr, dw_ptr, M, I, J, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(2).to(tl.int64)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        n = start + tl.arange(0, BLOCK)
        x = tl.trans(load_scaled(x_ptr, dy_ptr, n, i, k, M, I, K))
        dw = tl.dot(x, load_tile(z_ptr, n, j, M, J, J, 1), dw, input_precision=PRECISION)
    mask = (i[:, None] < I) & (j[None, :] < J)
    tl.store(dw_ptr + (k * I + i[:, None]) * J + j[None, :], dw.to(dw_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dc_kernel(dy_ptr, dc_ptr, M, K, BLOCK: tl.constexpr):
    k = tl.program_id(0)
    dc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dc += tl.load(dy_ptr + n.to(tl.int64) * K + k, mask=n < M, other=0.0).to(tl.float32)
    tl.store(dc_ptr + k, tl.sum(dc, axis=0).to(dc_ptr.dtype.element_ty))


class Bilinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, w, c):
        x, z, w = x.contiguous(), z.contiguous(), w.contiguous()
        ctx.save_for_backward(x, z, w)
        ctx.c_dtype = c.dtype
        return bilinear(x, z, w, c)

    @staticmethod
    def backward(ctx, dy):
        x, z, w = ctx.saved_tensors
        dy, (K, I, J), M, tiles, needs = dy.contiguous(), w.shape, x.shape[0], tiling(x), ctx.needs_input_grad
        rows, across_i, across_j = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, I, J))
        dx = dz = dw = dc = None
        if needs[0]:
            dx = torch.empty_like(x)
            factor_kernel[(rows, across_i)](z, w, dy, dx, M, I, J, K, I * J, 1, J, **tiles)
        if needs[1]:
            dz = torch.empty_like(z)
            factor_kernel[(rows, across_j)](x, w, dy, dz, M, J, I, K, I * J, J, 1, **tiles)
        if needs[2]:
            dw = torch.empty_like(w)
            dw_kernel[(across_i, across_j, K)](x, z, dy, dw, M, I, J, K, **tiles)
        if needs[3]:
            dc = torch.empty(K, device=w.device, dtype=ctx.c_dtype)
            dc_kernel[(K,)](dy, dc, M, K, BLOCK=1024)
        return dx, dz, dw, dc


def bilinear_autograd(x, z, w, c):
    return Bilinear.apply(x, z, w, c)

"""RMS norm and the linear layer after it in one product, with the norm as a scale of the output's rows.

Forward    r_i = (mean_k x_ik^2 + eps)^(-1/2),  Y = r_i (X * w) W^T
Backward   with G = dY W:  dW = (r_i dY)^T (X * w),  dw_k = sum_i r_i x_ik G_ik,
           dX = r_i w * G - (r_i^2 c_i / K) x_i,  c_i = <dY_i, Y_i>.  Derivation: Y_i is linear in r_i, so
           dr_i = <dY_i, Y_i> / r_i, and dr_i/dx_i = -r_i^3 x_i / K

Forward schedule: a program owns a tile of Y. r_i is one number for the whole row, so it is taken out of the
product: the loop over k multiplies x * w and, as it goes, adds up x^2; the tile is scaled at its end. The
norm needs no pass before and its output is never stored.
Backward schedule: done in the plain order, dX needs <G, x w> along a whole row of G, which no tile has. But
that sum is c_i, a number of the output side: a small kernel makes it from dY and Y before any product. With c
known the owner of a tile of dX finishes it in its epilogue, from G, x, r and c, and sums r x G over its rows
as its part of dw, whose parts are added at the end. dW has owners of its own, who scale x and dY as
they load them. So there are two products and two passes over small tensors, and no normalised row in memory.

op: rms_norm_linear
schedule: swap_owner, row_reduce_correct, partials_then_reduce
difficulty: 5
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
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_linear_kernel(
    x_ptr, w_ptr, W_ptr, y_ptr, r_ptr, M, N, K, eps, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, rows, k, M, K).to(tl.float32)
        w = tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        W = load_tile(W_ptr, cols, k, N, K)
        y = tl.dot((x * w[None, :]).to(W.dtype), tl.trans(W), y, input_precision=PRECISION)
        squares += x * x
    r = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    store_tile(y_ptr, y * r[:, None], rows, cols, M, N)
    if tl.program_id(1) == 0:
        tl.store(r_ptr + rows, r, mask=rows < M)


def norm_linear_forward(x, w, W, eps):
    (M, K), N = x.shape, W.shape[0]
    if W.shape[1] != K or w.shape != (K,):
        raise ValueError(f"rows of {K} need {K} weights and a matrix of {K} columns")
    tiles = tiles_of(x)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    r = torch.empty(M, device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    norm_linear_kernel[grid](x, w, W, y, r, M, N, K, eps, **tiles)
    return y, r


@autodiff(inputs_require_grad=(0, 1, 2))
def rms_norm_linear(x, w, W, eps=1e-6):
    """x: (M, K); w: (K), the scale of the norm; W: (N, K); gives (M, N)."""
    return norm_linear_forward(x.contiguous(), w.contiguous(), W.contiguous(), eps)[0]


def reference(x, w, W, eps=1e-6):
    r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return r * ((x * w) @ W.t())


SWEEP = [{"M": 4096, "N": 4096, "K": 2048}, {"M": 1021, "N": 3000, "K": 1100}]
SWEEP_CPU = [{"M": 40, "N": 36, "K": 50}, {"M": 7, "N": 70, "K": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N, K = dims["M"], dims["N"], dims["K"]
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = 1 + 0.2 * torch.randn(K, device=device, dtype=dtype)
    return x, w, torch.randn(N, K, device=device, dtype=dtype) / max(1, K) ** 0.5


# ---- backward ----


@triton.jit
def row_dot_kernel(y_ptr, dy_ptr, c_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = tl.load(y_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        products += y * tl.load(dy_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(c_ptr + row, tl.sum(products, axis=0))


@triton.jit
def dx_kernel(
    x_ptr, w_ptr, W_ptr, r_ptr, c_ptr, dy_ptr, dx_ptr, part_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, rows, cols, M, N)
        g = tl.dot(dy, load_tile(W_ptr, cols, k, N, K), g, input_precision=PRECISION)
    x = load_tile(x_ptr, rows, k, M, K).to(tl.float32)
    w = tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    r = tl.load(r_ptr + rows, mask=rows < M, other=0.0)
    c = tl.load(c_ptr + rows, mask=rows < M, other=0.0)
    g *= r[:, None]
    store_tile(dx_ptr, w[None, :] * g - (r * r * c / K)[:, None] * x, rows, k, M, K)
    tl.store(part_ptr + tl.program_id(0) * K + k, tl.sum(x * g, axis=0), mask=k < K)


@triton.jit
def matrix_kernel(x_ptr, w_ptr, r_ptr, dy_ptr, dW_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dW = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        r = tl.load(r_ptr + rows, mask=rows < M, other=0.0)
        dy = load_tile(dy_ptr, rows, cols, M, N)
        xhat = (load_tile(x_ptr, rows, k, M, K).to(tl.float32) * r[:, None]).to(dy.dtype)
        dW = tl.dot(tl.trans(dy), xhat, dW, input_precision=PRECISION)
    w = tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    store_tile(dW_ptr, dW * w[None, :], cols, k, N, K)


@triton.jit
def scale_sum_kernel(part_ptr, dw_ptr, parts, K, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    dw = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
    for start in range(0, parts, BLOCK_R):
        dw += load_tile(part_ptr, start + tl.arange(0, BLOCK_R), k, parts, K)
    tl.store(dw_ptr + k, tl.sum(dw, axis=0).to(dw_ptr.dtype.element_ty), mask=k < K)


class RMSNormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, W, eps):
        x, w, W = x.contiguous(), w.contiguous(), W.contiguous()
        y, r = norm_linear_forward(x, w, W, eps)
        ctx.save_for_backward(x, w, W, y, r)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, W, y, r = ctx.saved_tensors
        dy = dy.contiguous()
        (M, K), N = x.shape, W.shape[0]
        tiles = tiles_of(x)
        down, across, outputs = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, K, N))
        needs = ctx.needs_input_grad
        dx = dw = dW = None
        if needs[0] or needs[1]:
            dx, dw = torch.empty_like(x), torch.empty_like(w)
            c = torch.empty_like(r)
            part = torch.empty((down, K), device=x.device, dtype=torch.float32)
            row_dot_kernel[(M,)](y, dy, c, N, BLOCK=1024)
            dx_kernel[(down, across)](x, w, W, r, c, dy, dx, part, M, N, K, **tiles)
        if needs[1]:
            scale_sum_kernel[(triton.cdiv(K, 64),)](part, dw, down, K, BLOCK_R=32, BLOCK_K=64)
        if needs[2]:
            dW = torch.empty_like(W)
            matrix_kernel[(outputs, across)](x, w, r, dy, dW, M, N, K, **tiles)
        return dx if needs[0] else None, dw if needs[1] else None, dW, None


def rms_norm_linear_autograd(x, w, W, eps=1e-6):
    return RMSNormLinear.apply(x, w, W, eps)

"""Linear layer with bias.

Forward    Y = X W^T + b,  X (M, K), W (N, K), b (N)
Backward   dX = dY W,  dW = dY^T X,  db_n = sum_m dY_mn

Forward schedule: a program owns a tile of Y, walks K, and adds the bias in the epilogue.
Backward schedule: dX is a product owned by its tiles. dW's owner of (n tile, k tile) walks M and loads
every dY tile of its columns anyway, so the owners with k tile 0 also sum those tiles' columns: db costs no
extra read of dY, no partials and no launch.

op: linear
schedule: swap_owner
difficulty: 2
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
    if x.dtype == torch.float32:
        return {"PRECISION": PRECISION, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    return {"PRECISION": PRECISION, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8}


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (m[:, None] < M) & (k[None, :] < K)
        w_mask = (n[None, :] < N) & (k[:, None] < K)
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * K + k[None, :], mask=x_mask, other=0.0)
        w_t = tl.load(w_ptr + n[None, :].to(tl.int64) * K + k[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x, w_t, acc, input_precision=PRECISION)
    acc += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_mask = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None].to(tl.int64) * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def linear(x, w, b):
    if x.shape[1] != w.shape[1] or b.shape[0] != w.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    x, w, b = x.contiguous(), w.contiguous(), b.contiguous()
    M, K = x.shape
    N = w.shape[0]
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    tiles = tiling(x)
    grid = (triton.cdiv(M, tiles["BLOCK_M"]), triton.cdiv(N, tiles["BLOCK_N"]))
    linear_kernel[grid](x, w, b, y, M, N, K, **tiles)
    return y


def reference(x, w, b):
    return torch.nn.functional.linear(x, w, b)


SWEEP = [
    {"M": 4096, "K": 4096, "N": 4096},
    {"M": 8192, "K": 2048, "N": 5632},
    {"M": 4095, "K": 1000, "N": 3001},
]
SWEEP_CPU = [{"M": 39, "K": 44, "N": 35}, {"M": 16, "K": 96, "N": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype)
    b = torch.randn(dims["N"], device=device, dtype=dtype)
    return x, w, b


# ---- backward ----


@triton.jit
def dx_kernel(
    dy_ptr, w_ptr, dx_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dy = tl.load(
            dy_ptr + m[:, None].to(tl.int64) * N + n[None, :],
            mask=(m[:, None] < M) & (n[None, :] < N),
            other=0.0,
        )
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n[:, None] < N) & (k[None, :] < K),
            other=0.0,
        )
        acc = tl.dot(dy, w, acc, input_precision=PRECISION)
    dx_mask = (m[:, None] < M) & (k[None, :] < K)
    tl.store(dx_ptr + m[:, None].to(tl.int64) * K + k[None, :], acc.to(dx_ptr.dtype.element_ty), mask=dx_mask)


@triton.jit
def dw_db_kernel(
    dy_ptr, x_ptr, dw_ptr, db_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    dw = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    db = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        dy_t_mask = (m[None, :] < M) & (n[:, None] < N)
        dy_t = tl.load(dy_ptr + m[None, :].to(tl.int64) * N + n[:, None], mask=dy_t_mask, other=0.0)
        x = tl.load(
            x_ptr + m[:, None].to(tl.int64) * K + k[None, :],
            mask=(m[:, None] < M) & (k[None, :] < K),
            other=0.0,
        )
        dw = tl.dot(dy_t, x, dw, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            db += tl.sum(dy_t.to(tl.float32), axis=1)
    dw_mask = (n[:, None] < N) & (k[None, :] < K)
    tl.store(dw_ptr + n[:, None].to(tl.int64) * K + k[None, :], dw.to(dw_ptr.dtype.element_ty), mask=dw_mask)
    if tl.program_id(1) == 0:
        tl.store(db_ptr + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return linear(x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        M, K = x.shape
        N = w.shape[0]
        tiles = tiling(x)
        tiles_m, tiles_n, tiles_k = (
            triton.cdiv(size, tiles[block])
            for size, block in ((M, "BLOCK_M"), (N, "BLOCK_N"), (K, "BLOCK_K"))
        )
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            dx_kernel[(tiles_m, tiles_k)](dy, w, dx, M, N, K, **tiles)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dw = torch.empty_like(w)
            db = torch.empty(N, device=w.device, dtype=w.dtype)
            dw_db_kernel[(tiles_n, tiles_k)](dy, x, dw, db, M, N, K, **tiles)
        return dx, dw if ctx.needs_input_grad[1] else None, db if ctx.needs_input_grad[2] else None


def linear_autograd(x, w, b):
    return Linear.apply(x, w, b)

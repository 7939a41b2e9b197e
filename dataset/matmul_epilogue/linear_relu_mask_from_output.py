"""Linear layer with ReLU; the output itself says where the gradient passes.

Forward    Z = X W^T + b,  Y = max(Z, 0),   X (M, K), W (N, K), b (N)
Backward   dZ = [Z > 0] * dY = [Y > 0] * dY:   dX = dZ W,   dW = dZ^T X,   db_n = sum_m dZ_mn

Forward schedule: a program owns a tile of Y, walks K, and applies bias and ReLU before its one store.
Backward schedule: ReLU is the activation whose slope can be read off its output, and Y exists anyway, as the
next layer has saved it as an input: this layer keeps no memory of its own, neither Z nor a mask. dZ is not
stored either; owners of dX and of dW each make it from dY and Y as they load them, a comparison a number
before the dot. A mask kernel of its own would read two tensors and write a third, to save one of two reads
that the products share in cache. db is a sum over the rows that dW's owners walk, so the owners of dW's first
column of tiles take it along.

op: linear_relu
schedule: swap_owner, recompute_from_stats
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
def linear_relu_kernel(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = tl.trans(load_tile(w_ptr, n, k, N, K))
        z = tl.dot(load_tile(x_ptr, m, k, M, K), w, z, input_precision=PRECISION)
    z += tl.load(b_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    store_tile(y_ptr, tl.where(z > 0, z, 0.0), m, n, M, N)


@autodiff(inputs_require_grad=(0, 1, 2))
def linear_relu(x, w, b):
    """x: (M, K); w: (N, K); b: (N); gives (M, N)."""
    if x.shape[1] != w.shape[1] or b.shape[0] != w.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, w {tuple(w.shape)} and b {tuple(b.shape)} do not fit")
    x, w, b, (M, K), N, tiles = x.contiguous(), w.contiguous(), b.contiguous(), x.shape, w.shape[0], tiling(x)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    linear_relu_kernel[grid](x, w, b, y, M, N, K, **tiles)
    return y


def reference(x, w, b):
    return torch.relu(torch.nn.functional.linear(x, w, b))


SWEEP = [{"M": 8192, "K": 1024, "N": 4096}, {"M": 4095, "K": 500, "N": 3000}]
SWEEP_CPU = [{"M": 41, "K": 26, "N": 38}, {"M": 33, "K": 70, "N": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    w = torch.randn(dims["N"], dims["K"], device=device, dtype=dtype) / max(1, dims["K"]) ** 0.5
    return x, w, torch.randn(dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_dz(dy_ptr, y_ptr, m, n, M, N):
    """A tile of dZ; 0 outside, where Y is."""
    return tl.where(load_tile(y_ptr, m, n, M, N) > 0, load_tile(dy_ptr, m, n, M, N), 0.0)


@triton.jit
def dx_kernel(dy_ptr, y_ptr, w_ptr, dx_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        w = load_tile(w_ptr, n, k, N, K)
        dx = tl.dot(load_dz(dy_ptr, y_ptr, m, n, M, N).to(w.dtype), w, dx, input_precision=PRECISION)
    store_tile(dx_ptr, dx, m, k, M, K)


@triton.jit
def dw_db_kernel(dy_ptr, y_ptr, x_ptr, dw_ptr, db_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        x = load_tile(x_ptr, m, k, M, K)
        dz = load_dz(dy_ptr, y_ptr, m, n, M, N).to(x.dtype)
        dw = tl.dot(tl.trans(dz), x, dw, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            db += tl.sum(dz.to(tl.float32), axis=0)
    store_tile(dw_ptr, dw, n, k, N, K)
    if tl.program_id(1) == 0:
        tl.store(db_ptr + n, db.to(db_ptr.dtype.element_ty), mask=n < N)


class LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        x, w = x.contiguous(), w.contiguous()
        y = linear_relu(x, w, b)
        ctx.save_for_backward(x, w, y)
        ctx.b_dtype = b.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, y = ctx.saved_tensors
        dy = dy.contiguous()
        (M, K), N, tiles, needs = x.shape, w.shape[0], tiling(x), ctx.needs_input_grad
        across_m, across_n, across_k = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        dx = dw = db = None
        if needs[0]:
            dx = torch.empty_like(x)
            dx_kernel[(across_m, across_k)](dy, y, w, dx, M, N, K, **tiles)
        if needs[1] or needs[2]:
            dw, db = torch.empty_like(w), torch.empty(N, device=w.device, dtype=ctx.b_dtype)
            # one column of owners at least, so that db is stored where K is 0
            dw_db_kernel[(across_n, max(1, across_k))](dy, y, x, dw, db, M, N, K, **tiles)
        return dx, dw if needs[1] else None, db if needs[2] else None


def linear_relu_autograd(x, w, b):
    return LinearReLU.apply(x, w, b)

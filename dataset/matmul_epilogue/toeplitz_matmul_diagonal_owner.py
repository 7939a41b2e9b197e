"""Toeplitz mixing: the weight of two places depends on their distance alone, one number a diagonal.

Forward    Y_i = sum_j t_{i-j} X_j,   i, j in 0 .. N - 1;   t has 2 N - 1 numbers, t_{1-N} .. t_{N-1}
Backward   dX_j = sum_i t_{i-j} dY_i,   dt_r = sum over i - j = r of <dY_i, X_j>

Forward schedule: a program owns a tile of Y. It walks j and builds each tile of the matrix from t by a gather
of 2 BLOCK - 1 different numbers; the N x N matrix is never stored, and each tile of it goes into a dot.
Backward schedule: dX is the same kernel with the sign of the distance turned. dt sums along diagonals, which
cut through tiles. But all tiles (I, J) of one block diagonal, I - J = q, have their diagonals at the same
places, so their products dY_I X_J^T may be added first: the owner of q walks I and C, one dot a step, into a
single accumulator, and stores it once, 2 T - 1 tiles for T^2 products. A diagonal r then crosses the tiles of
at most two q; its owner in a second kernel adds BLOCK numbers of each, one from every row, in fixed order.

op: toeplitz_matmul
schedule: swap_owner, partials_then_reduce
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
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def toeplitz_kernel(
    t_ptr, x_ptr, y_ptr, N, C, SIGN: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = (i[:, None] < N) & (j[None, :] < N)
        x = load_tile(x_ptr, j, c, N, C)
        t = tl.load(t_ptr + N - 1 + SIGN * (i[:, None] - j[None, :]), mask=mask, other=0.0)
        y = tl.dot(t.to(x.dtype), x, y, input_precision=PRECISION)
    mask = (i[:, None] < N) & (c[None, :] < C)
    offs = i[:, None].to(tl.int64) * C + c[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def toeplitz_product(t, x, sign):
    """The matrix of t, or its transpose if sign is -1, times x."""
    (N, C), tiles = x.shape, tiling(x)
    y = torch.empty((N, C), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(N, tiles["BLOCK"]), triton.cdiv(C, tiles["BLOCK"]))
    toeplitz_kernel[grid](t, x, y, N, C, SIGN=sign, **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def toeplitz_matmul(t, x):
    """t: (2 N - 1); x: (N, C); gives (N, C)."""
    N = x.shape[0]
    if N == 0 or t.shape != (2 * N - 1,):
        raise ValueError(f"{N} places have {2 * N - 1} distances, t has {tuple(t.shape)}")
    return toeplitz_product(t.contiguous(), x.contiguous(), 1)


def reference(t, x):
    place = torch.arange(x.shape[0], device=x.device)
    return t[x.shape[0] - 1 + place[:, None] - place] @ x


SWEEP = [{"N": 2048, "C": 1024}, {"N": 1501, "C": 4000}]
SWEEP_CPU = [{"N": 45, "C": 20}, {"N": 70, "C": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    N = dims["N"]
    t = torch.randn(max(0, 2 * N - 1), device=device, dtype=dtype) / max(1, N) ** 0.5
    return t, torch.randn(N, dims["C"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def block_diagonal_kernel(x_ptr, dy_ptr, sums_ptr, N, C, tiles, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    q = tl.program_id(0) - (tiles - 1)
    a = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for block in range(tl.maximum(q, 0), tl.minimum(tiles, tiles + q)):
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            dy = load_tile(dy_ptr, block * BLOCK + a, c, N, C)
            x = load_tile(x_ptr, (block - q) * BLOCK + a, c, N, C)
            total = tl.dot(dy, tl.trans(x), total, input_precision=PRECISION)
    offs = tl.program_id(0) * BLOCK * BLOCK + a[:, None] * BLOCK + a[None, :]
    tl.store(sums_ptr + offs, total)


@triton.jit
def diagonal_kernel(sums_ptr, dt_ptr, N, tiles, BLOCK: tl.constexpr):
    """A program makes dt_r for r = q BLOCK + k, 0 <= k < BLOCK, from the tiles of q and of q + 1."""
    q = tl.program_id(0) - tiles
    k, row = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    column = row[:, None] - k[None, :]  # in the tile of q; one BLOCK further in that of q + 1
    own, next_tile = tl.program_id(0) - 1, tl.program_id(0)
    from_own = tl.load(
        sums_ptr + own * BLOCK * BLOCK + row[:, None] * BLOCK + column,
        mask=(column >= 0) & (own >= 0), other=0.0,
    )  # fmt: skip
    from_next = tl.load(
        sums_ptr + next_tile * BLOCK * BLOCK + row[:, None] * BLOCK + column + BLOCK,
        mask=(column < 0) & (next_tile < 2 * tiles - 1), other=0.0,
    )  # fmt: skip
    r = q * BLOCK + k
    dt = tl.sum(from_own + from_next, axis=0)
    tl.store(dt_ptr + N - 1 + r, dt.to(dt_ptr.dtype.element_ty), mask=(r > -N) & (r < N))


class ToeplitzMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, x):
        t, x = t.contiguous(), x.contiguous()
        ctx.save_for_backward(t, x)
        return toeplitz_matmul(t, x)

    @staticmethod
    def backward(ctx, dy):
        t, x = ctx.saved_tensors
        dy, (N, C), options = dy.contiguous(), x.shape, tiling(x)
        dt = dx = None
        if ctx.needs_input_grad[0]:
            BLOCK = options["BLOCK"]
            tiles = triton.cdiv(N, BLOCK)
            sums = torch.empty((2 * tiles - 1, BLOCK, BLOCK), device=x.device, dtype=torch.float32)
            block_diagonal_kernel[(2 * tiles - 1,)](x, dy, sums, N, C, tiles, **options)
            dt = torch.empty_like(t)
            diagonal_kernel[(2 * tiles,)](sums, dt, N, tiles, BLOCK=BLOCK)
        if ctx.needs_input_grad[1]:
            dx = toeplitz_product(t, dy, -1)
        return dt, dx


def toeplitz_matmul_autograd(t, x):
    return ToeplitzMatmul.apply(t, x)

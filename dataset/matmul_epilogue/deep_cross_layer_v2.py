"""Cross layer of a recommender: the features times a linear layer of themselves, plus a residual.

Forward    Z = X W^T + b,   Y = X0 * Z + X,   X0, X, Y (M, D), W (D, D), b (D)
Backward   dZ = X0 * dY:   dX = dZ W + dY,   dX0 = dY * Z,   dW = dZ^T X,   db = column sums of dZ

Forward schedule: a program owns a tile of Y, walks D for its tile of Z, and finishes in the epilogue. Z is
not stored: such layers are stacked, and X and X0 are all that each keeps.
Backward schedule: dX0 wants Z again. W is square, so the tile of Z (x_mt W_jt summed over t) and the tile of
dZ W (dZ_mt W_tj summed over t) stand at the same place and are sums of the same length: one owner carries
both accumulators along one walk, two dots a step, and stores dX0 and dX from one epilogue in which its tile
of dY serves both. If only one of the two is wanted, the other dot falls away at compile time. dW's owners
walk the rows and make dZ as they load; those of the first column of tiles take db along.

op: cross_layer
schedule: recompute_from_stats, swap_owner
difficulty: 3
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
def cross_kernel(x0_ptr, x_ptr, w_ptr, b_ptr, y_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        t = start + tl.arange(0, BLOCK)
        w = tl.trans(load_tile(w_ptr, j, t, D, D))
        z = tl.dot(load_tile(x_ptr, m, t, M, D), w, z, input_precision=PRECISION)
    z += tl.load(b_ptr + j, mask=j < D, other=0.0).to(tl.float32)[None, :]
    y = load_tile(x0_ptr, m, j, M, D).to(tl.float32) * z + load_tile(x_ptr, m, j, M, D).to(tl.float32)
    store_tile(y_ptr, y, m, j, M, D)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def cross_layer(x0, x, w, b):
    """x0, x: (M, D); w: (D, D); b: (D)."""
    (M, D), tiles = x.shape, tiling(x)
    if x0.shape != x.shape or w.shape != (D, D) or b.shape != (D,):
        raise ValueError(f"x0 {tuple(x0.shape)}, x {tuple(x.shape)} and w {tuple(w.shape)} do not fit")
    y, grid = torch.empty((M, D), device=x.device, dtype=x.dtype), (triton.cdiv(M, tiles["BLOCK"]),)
    tensors = [t.contiguous() for t in (x0, x, w, b)]
    cross_kernel[(*grid, triton.cdiv(D, tiles["BLOCK"]))](*tensors, y, M, D, **tiles)
    return y


def reference(x0, x, w, b):
    return x0 * torch.nn.functional.linear(x, w, b) + x


SWEEP = [{"M": 16384, "D": 1024}, {"M": 8191, "D": 430}]
SWEEP_CPU = [{"M": 34, "D": 40}, {"M": 9, "D": 67}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, D = dims["M"], dims["D"]
    x0, x = (torch.randn(M, D, device=device, dtype=dtype) for _ in range(2))
    w = torch.randn(D, D, device=device, dtype=dtype) / max(1, D) ** 0.5
    return x0, x, w, torch.randn(D, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def load_dz(x0_ptr, dy_ptr, rows, cols, M, D):
    """A tile of dZ, in the dtype of dY."""
    dy = load_tile(dy_ptr, rows, cols, M, D)
    return (load_tile(x0_ptr, rows, cols, M, D).to(tl.float32) * dy.to(tl.float32)).to(dy.dtype)


@triton.jit
def dx_dx0_kernel(
    x0_ptr, x_ptr, w_ptr, b_ptr, dy_ptr, dx0_ptr, dx_ptr, M, D,
    WANT_X0: tl.constexpr, WANT_X: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dx = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, D, BLOCK):
        t = start + tl.arange(0, BLOCK)
        if WANT_X0:
            w_jt = tl.trans(load_tile(w_ptr, j, t, D, D))
            z = tl.dot(load_tile(x_ptr, m, t, M, D), w_jt, z, input_precision=PRECISION)
        if WANT_X:
            w_tj = load_tile(w_ptr, t, j, D, D)
            dx = tl.dot(load_dz(x0_ptr, dy_ptr, m, t, M, D), w_tj, dx, input_precision=PRECISION)
    dy = load_tile(dy_ptr, m, j, M, D).to(tl.float32)
    if WANT_X0:
        z += tl.load(b_ptr + j, mask=j < D, other=0.0).to(tl.float32)[None, :]
        store_tile(dx0_ptr, dy * z, m, j, M, D)
    if WANT_X:
        store_tile(dx_ptr, dx + dy, m, j, M, D)


@triton.jit
def dw_db_kernel(x0_ptr, x_ptr, dy_ptr, dw_ptr, db_ptr, M, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dz = load_dz(x0_ptr, dy_ptr, m, j, M, D)
        dw = tl.dot(tl.trans(dz), load_tile(x_ptr, m, t, M, D), dw, input_precision=PRECISION)
        if tl.program_id(1) == 0:
            db += tl.sum(dz.to(tl.float32), axis=0)
    store_tile(dw_ptr, dw, j, t, D, D)
    if tl.program_id(1) == 0:
        tl.store(db_ptr + j, db.to(db_ptr.dtype.element_ty), mask=j < D)


class CrossLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x0, x, w, b):
        x0, x, w, b = x0.contiguous(), x.contiguous(), w.contiguous(), b.contiguous()
        ctx.save_for_backward(x0, x, w, b)
        return cross_layer(x0, x, w, b)

    @staticmethod
    def backward(ctx, dy):
        x0, x, w, b = ctx.saved_tensors
        dy, (M, D), tiles, needs = dy.contiguous(), x.shape, tiling(x), ctx.needs_input_grad
        rows, cols = triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(D, tiles["BLOCK"])
        dx0, dx, dw, db = (torch.empty_like(t) for t in (x0, x, w, b))
        if needs[0] or needs[1]:
            dx_dx0_kernel[(rows, cols)](
                x0, x, w, b, dy, dx0, dx, M, D, WANT_X0=needs[0], WANT_X=needs[1], **tiles
            )
        if needs[2] or needs[3]:
            dw_db_kernel[(cols, cols)](x0, x, dy, dw, db, M, D, **tiles)
        return tuple(g if needed else None for g, needed in zip((dx0, dx, dw, db), needs, strict=True))


def cross_layer_autograd(x0, x, w, b):
    return CrossLayer.apply(x0, x, w, b)

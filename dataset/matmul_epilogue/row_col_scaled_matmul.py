"""Matrix product with a learned scale for each row and each column of the result.

Forward    P = A B,   Y_ij = r_i P_ij c_j
Backward   with H_ij = r_i dY_ij c_j, which is dP:  dA = H B^T,  dB = A^T H;
           dr_i = sum_j dY_ij P_ij c_j,   dc_j = sum_i dY_ij P_ij r_i

Forward schedule: a program owns a tile; the scales are its epilogue.
Backward schedule: Y knows all sums but those of zeros: dr_i is <dY_i, Y_i> / r_i, so nothing of P need be
saved, until a scale is 0 and P is lost. Scales that start at 0 are common, so P is stored in the forward
where a gradient is wanted, in Y's own type. One pass over dY and P then gives both sums: the owner of a tile
reduces it along both axes and stores its shares in two sets of slots; another kernel adds each set. H is made
on load in the two products, r along the rows and c along the columns of a tile of dY, and never stored.

op: scaled_matmul
schedule: swap_owner, row_reduce_correct, partials_then_reduce
difficulty: 3
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
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * C + cols[None, :]
    tl.store(ptr + offs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_scales(r_ptr, c_ptr, i, j, M, N):
    """r of the rows as a column, c of the columns as a row."""
    r = tl.load(r_ptr + i, mask=i < M, other=0.0).to(tl.float32)
    return r[:, None], tl.load(c_ptr + j, mask=j < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def scaled_kernel(
    a_ptr, b_ptr, r_ptr, c_ptr, y_ptr, p_ptr, M, N, K,
    SAVE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, i, k, M, K)
        p = tl.dot(a, load_tile(b_ptr, k, j, K, N), p, input_precision=PRECISION)
    r, c = load_scales(r_ptr, c_ptr, i, j, M, N)
    store_tile(y_ptr, r * p * c, i, j, M, N)
    if SAVE:
        store_tile(p_ptr, p, i, j, M, N)


def scaled_forward(a, b, r, c, save):
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    if b.shape[0] != K or r.shape != (M,) or c.shape != (N,):
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, r {tuple(r.shape)}, c {tuple(c.shape)}")
    y = torch.empty((M, N), device=a.device, dtype=a.dtype)
    p = torch.empty_like(y) if save else None
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    scaled_kernel[grid](a, b, r, c, y, p, M, N, K, SAVE=save, **tiles)
    return y, p


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def scaled_matmul(a, b, r, c):
    """a: (M, K); b: (K, N); r: (M); c: (N)."""
    return scaled_forward(a.contiguous(), b.contiguous(), r.contiguous(), c.contiguous(), False)[0]


def reference(a, b, r, c):
    return r[:, None] * (a @ b) * c


SWEEP = [{"M": 8192, "K": 4096, "N": 2048}, {"M": 2003, "K": 1020, "N": 1501}]
SWEEP_CPU = [{"M": 33, "K": 40, "N": 28}, {"M": 70, "K": 20, "N": 65}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = (dims[name] for name in "MKN")
    a = torch.randn(M, K, device=device, dtype=dtype)
    b = torch.randn(K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    r, c = (1 + 0.3 * torch.randn(size, device=device, dtype=dtype) for size in (M, N))
    return a, b, r, c


# ---- backward ----


@triton.jit
def da_kernel(dy_ptr, b_ptr, r_ptr, c_ptr, da_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        r, c = load_scales(r_ptr, c_ptr, i, j, M, N)
        h = (r * load_tile(dy_ptr, i, j, M, N).to(tl.float32) * c).to(b_ptr.dtype.element_ty)
        b = tl.trans(load_tile(b_ptr, k, j, K, N))
        da = tl.dot(h, b, da, input_precision=PRECISION)
    store_tile(da_ptr, da, i, k, M, K)


@triton.jit
def db_kernel(a_ptr, dy_ptr, r_ptr, c_ptr, db_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r, c = load_scales(r_ptr, c_ptr, i, j, M, N)
        h = (r * load_tile(dy_ptr, i, j, M, N).to(tl.float32) * c).to(a_ptr.dtype.element_ty)
        a = tl.trans(load_tile(a_ptr, i, k, M, K))
        db = tl.dot(a, h, db, input_precision=PRECISION)
    store_tile(db_ptr, db, k, j, K, N)


@triton.jit
def shares_kernel(dy_ptr, p_ptr, r_ptr, c_ptr, row_ptr, col_ptr, M, N, BLOCK: tl.constexpr):
    """A tile's shares of dr (column tiles, M) and of dc (row tiles, N)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    r, c = load_scales(r_ptr, c_ptr, i, j, M, N)
    both = load_tile(dy_ptr, i, j, M, N).to(tl.float32) * load_tile(p_ptr, i, j, M, N).to(tl.float32)
    tl.store(row_ptr + tl.program_id(1).to(tl.int64) * M + i, tl.sum(both * c, axis=1), mask=i < M)
    tl.store(col_ptr + tl.program_id(0).to(tl.int64) * N + j, tl.sum(both * r, axis=0), mask=j < N)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, count, size, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([SLOTS, BLOCK], dtype=tl.float32)
    for start in range(0, count, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        mask = (slot[:, None] < count) & (i[None, :] < size)
        total += tl.load(slots_ptr + slot[:, None] * size + i[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + i, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=i < size)


class ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, r, c):
        a, b, r, c = a.contiguous(), b.contiguous(), r.contiguous(), c.contiguous()
        y, p = scaled_forward(a, b, r, c, ctx.needs_input_grad[2] or ctx.needs_input_grad[3])
        ctx.save_for_backward(a, b, r, c, p)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b, r, c, p = ctx.saved_tensors
        (M, K), N, tiles, needs, dy = a.shape, b.shape[1], tiling(a), ctx.needs_input_grad, dy.contiguous()
        count_m, count_n, count_k = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        da = db = dr = dc = None
        if needs[0]:
            da = torch.empty_like(a)
            da_kernel[(count_m, count_k)](dy, b, r, c, da, M, N, K, **tiles)
        if needs[1]:
            db = torch.empty_like(b)
            db_kernel[(count_k, count_n)](a, dy, r, c, db, M, N, K, **tiles)
        if needs[2] or needs[3]:
            dr, dc = torch.empty_like(r), torch.empty_like(c)
            rows = torch.empty((count_n, M), device=a.device, dtype=torch.float32)
            cols = torch.empty((count_m, N), device=a.device, dtype=torch.float32)
            shares_kernel[(count_m, count_n)](dy, p, r, c, rows, cols, M, N, BLOCK=tiles["BLOCK"])
            sum_slots_kernel[(triton.cdiv(M, 64),)](rows, dr, count_n, M, SLOTS=32, BLOCK=64)
            sum_slots_kernel[(triton.cdiv(N, 64),)](cols, dc, count_m, N, SLOTS=32, BLOCK=64)
        return da, db, dr if needs[2] else None, dc if needs[3] else None


def scaled_matmul_autograd(a, b, r, c):
    return ScaledMatmul.apply(a, b, r, c)

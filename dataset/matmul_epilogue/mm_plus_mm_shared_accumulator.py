"""Sum of two matrix products in one accumulator, as of two inputs with a weight each.

Forward    Y = A B + C D,   A (M, K), B (K, N), C (M, L), D (L, N)
Backward   dA = dY B^T,   dC = dY D^T,   dB = A^T dY,   dD = C^T dY

Forward schedule: a program owns a tile of Y and walks K, then L, into the same accumulator: neither product
is stored, and there is no addition.
Backward schedule: dY is the one operand of all four gradients, and each of the four products reads it whole.
They are paired by what they do with it. dA and dC walk N with the same rows of dY: an owner of (rows, t-th
tile of K and of L) loads a tile of dY once and feeds two dots from it. dB and dD walk M with the same columns
of dY, and are paired alike. Two launches, and dY is read half as often as by four. Where K and L differ, the
longer has tiles without a partner, and a dot of zeros beside theirs; where they differ by much, four launches
are better.

op: mm_plus_mm
schedule: swap_owner
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(a):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK": 32 if a.dtype == torch.float32 else 64}


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
def mm_plus_mm_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, y_ptr, M, N, K, L, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        y = tl.dot(load_tile(a_ptr, m, k, M, K), load_tile(b_ptr, k, n, K, N), y, input_precision=PRECISION)
    for start in range(0, L, BLOCK):
        k = start + tl.arange(0, BLOCK)
        y = tl.dot(load_tile(c_ptr, m, k, M, L), load_tile(d_ptr, k, n, L, N), y, input_precision=PRECISION)
    store_tile(y_ptr, y, m, n, M, N)


@autodiff(inputs_require_grad=(0, 1, 2, 3))
def mm_plus_mm(a, b, c, d):
    """a: (M, K); b: (K, N); c: (M, L); d: (L, N); gives (M, N)."""
    (M, K), (L, N), tiles = a.shape, d.shape, tiling(a)
    if b.shape != (K, N) or c.shape != (M, L):
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}, d {tuple(d.shape)}")
    y = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    tensors = [t.contiguous() for t in (a, b, c, d)]
    mm_plus_mm_kernel[grid](*tensors, y, M, N, K, L, **tiles)
    return y


def reference(a, b, c, d):
    return a @ b + c @ d


SWEEP = [{"M": 4096, "K": 2048, "L": 1024, "N": 2048}, {"M": 2047, "K": 500, "L": 1500, "N": 1000}]
SWEEP_CPU = [{"M": 25, "K": 30, "L": 18, "N": 33}, {"M": 40, "K": 9, "L": 70, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, L, N = (dims[name] for name in ("M", "K", "L", "N"))
    a, c = (torch.randn(M, size, device=device, dtype=dtype) for size in (K, L))
    b, d = (torch.randn(size, N, device=device, dtype=dtype) for size in (K, L))
    return a, b, c, d


# ---- backward ----


@triton.jit
def da_dc_kernel(
    dy_ptr, b_ptr, d_ptr, da_ptr, dc_ptr, M, N, K, L, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dc = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, n, M, N)
        da = tl.dot(dy, tl.trans(load_tile(b_ptr, t, n, K, N)), da, input_precision=PRECISION)
        dc = tl.dot(dy, tl.trans(load_tile(d_ptr, t, n, L, N)), dc, input_precision=PRECISION)
    store_tile(da_ptr, da, m, t, M, K)
    store_tile(dc_ptr, dc, m, t, M, L)


@triton.jit
def db_dd_kernel(
    dy_ptr, a_ptr, c_ptr, db_ptr, dd_ptr, M, N, K, L, PRECISION: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dd = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        dy = load_tile(dy_ptr, m, n, M, N)
        db = tl.dot(tl.trans(load_tile(a_ptr, m, t, M, K)), dy, db, input_precision=PRECISION)
        dd = tl.dot(tl.trans(load_tile(c_ptr, m, t, M, L)), dy, dd, input_precision=PRECISION)
    store_tile(db_ptr, db, t, n, K, N)
    store_tile(dd_ptr, dd, t, n, L, N)


class MmPlusMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, c, d):
        a, b, c, d = a.contiguous(), b.contiguous(), c.contiguous(), d.contiguous()
        ctx.save_for_backward(a, b, c, d)
        return mm_plus_mm(a, b, c, d)

    @staticmethod
    def backward(ctx, dy):
        a, b, c, d = ctx.saved_tensors
        dy, (M, K), (L, N), tiles, needs = dy.contiguous(), a.shape, d.shape, tiling(a), ctx.needs_input_grad
        rows, cols, deep = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, max(K, L)))
        da, db, dc, dd = (torch.empty_like(t) for t in (a, b, c, d))
        if needs[0] or needs[2]:
            da_dc_kernel[(rows, deep)](dy, b, d, da, dc, M, N, K, L, **tiles)
        if needs[1] or needs[3]:
            db_dd_kernel[(deep, cols)](dy, a, c, db, dd, M, N, K, L, **tiles)
        return tuple(g if needed else None for g, needed in zip((da, db, dc, dd), needs, strict=True))


def mm_plus_mm_autograd(a, b, c, d):
    return MmPlusMm.apply(a, b, c, d)

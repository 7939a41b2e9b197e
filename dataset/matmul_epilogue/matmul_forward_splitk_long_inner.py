"""Product of two thin matrices over a very long inner dimension: split forward, not backward.

Forward    C = A B,   A (M, K), B (K, N), K much larger than M and N
Backward   dA = dC B^T,   dB = A^T dC

Forward schedule: C has few tiles, and each sums K products. The inner dimension is cut into parts; a program
owns (tile of C, part) and stores a partial tile in float32, and a second kernel adds the parts in order.
Backward schedule: the dimension that was long is no sum any more. dA and dB are as large as A and B,
thousands of tiles along K, and sum over N or M, some tens or hundreds of products. So their owners fill the
GPU without any split, hold no partial results, and store once; both are bound by the memory that reads one
factor and writes the gradient of the other. The split belonged to the shape, not to the operation: a backward
that copied it would write its results many times over.

op: matmul
schedule: swap_owner, partials_then_reduce
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PROGRAMS = 512  # tiles of C times parts: enough to fill a GPU


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
def part_kernel(a_ptr, b_ptr, slots_ptr, M, N, K, part, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(2) * part
    c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part, K), BLOCK):
        k = start + tl.arange(0, BLOCK)  # parts are whole tiles, so only the last one meets K
        c = tl.dot(load_tile(a_ptr, m, k, M, K), load_tile(b_ptr, k, n, K, N), c, input_precision=PRECISION)
    store_tile(slots_ptr + tl.program_id(2) * M * N, c, m, n, M, N)


@triton.jit
def sum_parts_kernel(slots_ptr, c_ptr, parts, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(parts):
        c += tl.load(slots_ptr + i, mask=i < size, other=0.0)
        slots_ptr += size
    tl.store(c_ptr + i, c.to(c_ptr.dtype.element_ty), mask=i < size)


@autodiff(inputs_require_grad=(0, 1))
def long_matmul(a, b):
    """a: (M, K); b: (K, N), M and N at most 4096; gives (M, N)."""
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    if b.shape[0] != K or max(M, N) > 4096:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit, or are not thin")
    BLOCK = tiles["BLOCK"]
    rows, cols = triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK)
    wanted = triton.cdiv(PROGRAMS, max(1, rows * cols))
    part = max(1, triton.cdiv(K, wanted * BLOCK)) * BLOCK
    parts = triton.cdiv(K, part)
    slots = torch.empty((parts, M, N), device=a.device, dtype=torch.float32)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    part_kernel[(rows, cols, parts)](a.contiguous(), b.contiguous(), slots, M, N, K, part, **tiles)
    sum_parts_kernel[(triton.cdiv(M * N, 256),)](slots, c, parts, M * N, BLOCK=256)
    return c


def reference(a, b):
    return a @ b


SWEEP = [{"M": 128, "K": 262144, "N": 128}, {"M": 200, "K": 100003, "N": 50}]
SWEEP_CPU = [{"M": 16, "K": 400, "N": 23}, {"M": 40, "K": 90, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    scale = max(1, dims["K"]) ** -0.25
    a = scale * torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, scale * torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def da_kernel(b_ptr, dc_ptr, da_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        b = tl.trans(load_tile(b_ptr, k, n, K, N))
        da = tl.dot(load_tile(dc_ptr, m, n, M, N), b, da, input_precision=PRECISION)
    store_tile(da_ptr, da, m, k, M, K)


@triton.jit
def db_kernel(a_ptr, dc_ptr, db_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        a = tl.trans(load_tile(a_ptr, m, k, M, K))
        db = tl.dot(a, load_tile(dc_ptr, m, n, M, N), db, input_precision=PRECISION)
    store_tile(db_ptr, db, k, n, K, N)


class LongMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return long_matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        dc, (M, K), N, tiles = dc.contiguous(), a.shape, b.shape[1], tiling(a)
        rows, cols, deep = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, N, K))
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            da_kernel[(deep, rows)](b, dc, da, M, N, K, **tiles)
        if ctx.needs_input_grad[1]:
            db = torch.empty_like(b)
            db_kernel[(deep, cols)](a, dc, db, M, N, K, **tiles)
        return da, db


def long_matmul_autograd(a, b):
    return LongMatmul.apply(a, b)

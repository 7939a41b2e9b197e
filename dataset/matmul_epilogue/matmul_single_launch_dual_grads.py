"""Matrix product whose two gradients come from one launch.

Forward    C = A B,   A (M, K), B (K, N)
Backward   dA = dC B^T,   dB = A^T dC

Forward schedule: a program owns a tile of C and walks K.
Backward schedule: each gradient's tiles have owners of their own, and the two do not depend on each other.
For layers of moderate size neither set of tiles fills the GPU, and launched one after the other each leaves
it half empty, twice. So one grid has both: the first programs own tiles of dA and walk N, the others own
tiles of dB and walk M. Which one a program is depends on its number alone, the same for all of its lanes, so
the branch costs nothing; both branches keep their accumulator in the same registers. The longer of the two
walks should start first, or it would end alone: the side that walks more comes first in the grid.

op: matmul
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
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        c = tl.dot(load_tile(a_ptr, m, k, M, K), load_tile(b_ptr, k, n, K, N), c, input_precision=PRECISION)
    store_tile(c_ptr, c, m, n, M, N)


@autodiff(inputs_require_grad=(0, 1))
def matmul(a, b):
    """a: (M, K); b: (K, N); gives (M, N)."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    matmul_kernel[grid](a.contiguous(), b.contiguous(), c, M, N, K, **tiles)
    return c


def reference(a, b):
    return a @ b


SWEEP = [{"M": 1024, "K": 768, "N": 768}, {"M": 2047, "K": 500, "N": 1000}]
SWEEP_CPU = [{"M": 50, "K": 33, "N": 60}, {"M": 20, "K": 70, "N": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def da_tile(b_ptr, dc_ptr, da_ptr, tile, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(K, BLOCK)
    m, k = tile // across * BLOCK + tl.arange(0, BLOCK), tile % across * BLOCK + tl.arange(0, BLOCK)
    da = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        b = tl.trans(load_tile(b_ptr, k, n, K, N))
        da = tl.dot(load_tile(dc_ptr, m, n, M, N), b, da, input_precision=PRECISION)
    store_tile(da_ptr, da, m, k, M, K)


@triton.jit
def db_tile(a_ptr, dc_ptr, db_ptr, tile, M, N, K, PRECISION: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(N, BLOCK)
    k, n = tile // across * BLOCK + tl.arange(0, BLOCK), tile % across * BLOCK + tl.arange(0, BLOCK)
    db = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        m = start + tl.arange(0, BLOCK)
        a = tl.trans(load_tile(a_ptr, m, k, M, K))
        db = tl.dot(a, load_tile(dc_ptr, m, n, M, N), db, input_precision=PRECISION)
    store_tile(db_ptr, db, k, n, K, N)


@triton.jit
def both_grads_kernel(
    a_ptr, b_ptr, dc_ptr, da_ptr, db_ptr, da_first, da_tiles, db_first, M, N, K,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if (pid >= da_first) & (pid < da_first + da_tiles):
        da_tile(b_ptr, dc_ptr, da_ptr, pid - da_first, M, N, K, PRECISION, BLOCK)
    else:
        db_tile(a_ptr, dc_ptr, db_ptr, pid - db_first, M, N, K, PRECISION, BLOCK)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        dc, (M, K), N, tiles, needs = dc.contiguous(), a.shape, b.shape[1], tiling(a), ctx.needs_input_grad
        rows, deep, cols = (triton.cdiv(size, tiles["BLOCK"]) for size in (M, K, N))
        da_tiles = rows * deep if needs[0] else 0
        db_tiles = deep * cols if needs[1] else 0
        da_first, db_first = (0, da_tiles) if N >= M else (db_tiles, 0)
        da, db = torch.empty_like(a), torch.empty_like(b)
        both_grads_kernel[(da_tiles + db_tiles,)](
            a, b, dc, da, db, da_first, da_tiles, db_first, M, N, K, **tiles
        )
        return da if needs[0] else None, db if needs[1] else None


def matmul_autograd(a, b):
    return Matmul.apply(a, b)

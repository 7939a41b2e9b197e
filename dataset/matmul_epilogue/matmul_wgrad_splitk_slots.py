"""Matrix product with many rows and a small weight; the weight's gradient split over rows, reproducibly.

Forward    C = A B,   A (M, K), B (K, N), M much larger than K and N
Backward   dA = dC B^T,   dB = A^T dC = sum over splits S of A_S^T dC_S

Forward schedule: a program owns a tile of C and walks K. M gives it tiles enough.
Backward schedule: dA has as many tiles as C. dB has few, each with a sum over all of M: with one owner a tile
most of a GPU would be idle for M / BLOCK_M steps. So M is cut, every (tile, split) sums its rows in registers
and stores a tile of fp32 into its own slot, and a second kernel adds the slots in order. Atomic adds into one
buffer need no slots, but add in another order on every run; here two runs agree to the bit. The number of
splits is chosen so that tiles times splits fill the machine once: more would only write more slots.

op: matmul
schedule: partials_then_reduce, swap_owner
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


PROGRAMS = 256  # of the split product: about what runs at once
MIN_SPLIT = 64  # rows of a split at least


def tiling(rows):
    """Tiles, of so many rows of A and C, and the precision of dots."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_M": rows, "BLOCK_N": 32, "BLOCK_K": 32}


@triton.jit
def load_tile(ptr, rows, cols, row_end, C):
    mask = (rows[:, None] < row_end) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a, b = load_tile(a_ptr, m, k, M, K), load_tile(b_ptr, k, n, K, N)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    store_tile(c_ptr, acc, m, n, M, N)


@autodiff(inputs_require_grad=(0, 1))
def tall_matmul(a, b):
    """a: (M, K); b: (K, N)."""
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    a, b = a.contiguous(), b.contiguous()
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty((M, N), device=a.device, dtype=a.dtype)
    matmul_kernel[(triton.cdiv(M, 64), triton.cdiv(N, 32))](a, b, c, M, N, K, **tiling(64))
    return c


def reference(a, b):
    return a @ b


SWEEP = [{"M": 262144, "K": 128, "N": 64}, {"M": 100003, "K": 96, "N": 192}]
SWEEP_CPU = [{"M": 300, "K": 24, "N": 20}, {"M": 129, "K": 40, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def da_kernel(
    dc_ptr, b_ptr, da_ptr, M, N, K,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        dc, b = load_tile(dc_ptr, m, n, M, N), load_tile(b_ptr, k, n, K, N)
        acc = tl.dot(dc, tl.trans(b), acc, input_precision=PRECISION)
    store_tile(da_ptr, acc, m, k, M, K)


@triton.jit
def db_partial_kernel(
    a_ptr, dc_ptr, slots_ptr, M, N, K, split,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """slots[s] = A^T dC over the rows from s split to (s + 1) split."""
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * split
    end = tl.minimum(first + split, M)
    acc = tl.zeros([BLOCK_K, BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        a, dc = load_tile(a_ptr, m, k, end, K), load_tile(dc_ptr, m, n, end, N)
        acc = tl.dot(tl.trans(a), dc, acc, input_precision=PRECISION)
    store_tile(slots_ptr + tl.program_id(2).to(tl.int64) * K * N, acc, k, n, K, N)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, slots, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        acc += tl.load(slots_ptr + slot * size + i, mask=i < size, other=0.0)
    tl.store(out_ptr + i, acc.to(out_ptr.dtype.element_ty), mask=i < size)


class TallMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return tall_matmul(a, b)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        dc = dc.contiguous()
        (M, K), N = a.shape, b.shape[1]
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            da_kernel[(triton.cdiv(M, 64), triton.cdiv(K, 32))](dc, b, da, M, N, K, **tiling(64))
        if ctx.needs_input_grad[1]:
            tiles = triton.cdiv(K, 32), triton.cdiv(N, 32)
            split = max(MIN_SPLIT, triton.cdiv(M * tiles[0] * tiles[1], PROGRAMS))
            splits = triton.cdiv(M, split)
            slots = torch.empty((splits, K, N), device=a.device, dtype=torch.float32)
            db_partial_kernel[(*tiles, splits)](a, dc, slots, M, N, K, split, **tiling(32))
            db = torch.empty_like(b)
            sum_slots_kernel[(triton.cdiv(K * N, 128),)](slots, db, splits, K * N, BLOCK=128)
        return da, db


def tall_matmul_autograd(a, b):
    return TallMatmul.apply(a, b)

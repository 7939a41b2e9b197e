"""Log-sum-exp of every row of a product; the scores are never stored.

Forward    s_ij = <a_i, b_j>,   y_i = log sum_j exp(s_ij),   a (M, D), b (N, D)
Backward   dy_i/ds_ij = exp(s_ij - y_i) = p_ij, so   da_i = dy_i sum_j p_ij b_j,   db_j = sum_i dy_i p_ij a_i

Forward schedule: a program owns a tile of rows of a, keeps it in registers, and walks the rows of b with a
running maximum and sum. y is float32, as it becomes an exponent again.
Backward schedule: y is the normaliser itself, so one dot and one exp rebuild a tile of p from nothing but the
inputs and the output. da sums over j and db over i: the owner of rows of a walks b, the owner of rows of b
walks a, and each stores once. Sharing the rebuilt tiles would mean atomics for one of the two, M N / BLOCK
rows of traffic, for one dot of four saved. dy_i is a constant along a walk for da, and multiplies the
finished sum; for db it belongs to the summed rows, and goes into p before the dot.

op: matmul_lse
schedule: swap_owner, recompute_from_stats
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
    BLOCK_D = max(16, triton.next_power_of_2(a.shape[1]))
    BLOCK = 32 if a.dtype == torch.float32 else 64
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8 if BLOCK_D > 64 else 4}


@triton.jit
def load_tile(ptr, rows, d, R, D):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, d, R, D):
    mask = (rows[:, None] < R) & (d[None, :] < D)
    tl.store(ptr + rows[:, None].to(tl.int64) * D + d[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def matmul_lse_kernel(
    a_ptr, b_ptr, y_ptr, M, N, D, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    a = load_tile(a_ptr, i, d, M, D)
    largest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = tl.dot(a, tl.trans(load_tile(b_ptr, j, d, N, D)), input_precision=PRECISION)
        s = tl.where(j[None, :] < N, s, -float("inf"))
        larger = tl.maximum(largest, tl.max(s, axis=1))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(s - larger[:, None]), axis=1)
        largest = larger
    tl.store(y_ptr + i, largest + tl.log(total), mask=i < M)


@autodiff(inputs_require_grad=(0, 1))
def matmul_logsumexp(a, b):
    """a: (M, D); b: (N, D), D at most 128; gives (M) in float32."""
    (M, D), N, tiles = a.shape, b.shape[0], tiling(a)
    if b.shape[1] != D or D > 128 or N == 0:
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}: one width of at most 128, and b not empty")
    y = torch.empty(M, device=a.device, dtype=torch.float32)
    grid = (triton.cdiv(M, tiles["BLOCK"]),)
    matmul_lse_kernel[grid](a.contiguous(), b.contiguous(), y, M, N, D, **tiles)
    return y


def reference(a, b):
    return torch.logsumexp(a @ b.t(), dim=1)


SWEEP = [{"M": 8192, "D": 128, "N": 8192}, {"M": 4095, "D": 100, "N": 10007}]
SWEEP_CPU = [{"M": 40, "D": 16, "N": 67}, {"M": 33, "D": 24, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    D = dims["D"]
    a = torch.randn(dims["M"], D, device=device, dtype=dtype) / max(1, D) ** 0.25
    return a, torch.randn(dims["N"], D, device=device, dtype=dtype) / max(1, D) ** 0.25


# ---- backward ----


@triton.jit
def rebuild_p(a, b, y, i, j, M, N, PRECISION: tl.constexpr):
    s = tl.dot(a, tl.trans(b), input_precision=PRECISION)
    s = tl.where((i[:, None] < M) & (j[None, :] < N), s, -float("inf"))
    return tl.exp(s - y[:, None])


@triton.jit
def da_kernel(
    a_ptr, b_ptr, y_ptr, dy_ptr, da_ptr, M, N, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    a = load_tile(a_ptr, i, d, M, D)
    y = tl.load(y_ptr + i, mask=i < M, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < M, other=0.0)
    da = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        b = load_tile(b_ptr, j, d, N, D)
        p = rebuild_p(a, b, y, i, j, M, N, PRECISION)
        da = tl.dot(p.to(b.dtype), b, da, input_precision=PRECISION)
    store_tile(da_ptr, da * dy[:, None], i, d, M, D)


@triton.jit
def db_kernel(
    a_ptr, b_ptr, y_ptr, dy_ptr, db_ptr, M, N, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    j, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    b = load_tile(b_ptr, j, d, N, D)
    db = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, i, d, M, D)
        y = tl.load(y_ptr + i, mask=i < M, other=0.0)
        dy = tl.load(dy_ptr + i, mask=i < M, other=0.0)
        p = rebuild_p(a, b, y, i, j, M, N, PRECISION) * dy[:, None]
        db = tl.dot(tl.trans(p.to(a.dtype)), a, db, input_precision=PRECISION)
    store_tile(db_ptr, db, j, d, N, D)


class MatmulLogsumexp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        y = matmul_logsumexp(a, b)
        ctx.save_for_backward(a, b, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        a, b, y = ctx.saved_tensors
        dy, (M, D), N, tiles = dy.contiguous(), a.shape, b.shape[0], tiling(a)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch.empty_like(a)
            da_kernel[(triton.cdiv(M, tiles["BLOCK"]),)](a, b, y, dy, da, M, N, D, **tiles)
        if ctx.needs_input_grad[1]:
            db = torch.empty_like(b)
            db_kernel[(triton.cdiv(N, tiles["BLOCK"]),)](a, b, y, dy, db, M, N, D, **tiles)
        return da, db


def matmul_logsumexp_autograd(a, b):
    return MatmulLogsumexp.apply(a, b)

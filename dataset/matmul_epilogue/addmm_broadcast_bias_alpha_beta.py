"""alpha A B + beta C, where C is a whole matrix or one row for all.

Forward    Y = alpha A B + beta C,   A (M, K), B (K, N), C (M, N) or (N)
Backward   dA = alpha dY B^T,   dB = alpha A^T dY,   dC = beta dY, or beta sum_m dY_mn for a single row

Forward schedule: a program owns a tile of Y, walks K, and adds its tile of C in the epilogue; a single row is
the same load with a row stride of 0.
Backward schedule: the two products have owners of their own tiles, and alpha multiplies a finished
accumulator, not every operand. What a broadcast spread is summed on the way back, what it did not spread is
only scaled: two kernels for dC, by its shape. The whole matrix keeps flat tiles. The row sums over all of
dY's rows: owners of (part of the rows, tile of columns) store a partial row each, and a small kernel adds the
parts, so that many rows do not wait for a few owners of columns.

op: addmm
schedule: swap_owner, same_tile_pointwise, partials_then_reduce
difficulty: 2
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
def load_tile(ptr, rows, cols, R, C, stride_r, stride_c):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    offs = rows[:, None].to(tl.int64) * stride_r + cols[None, :].to(tl.int64) * stride_c
    return tl.load(ptr + offs, mask=mask, other=0.0)


@triton.jit
def addmm_kernel(
    a_ptr, b_ptr, c_ptr, y_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, alpha, beta,
    ADD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = load_tile(a_ptr, m, k, M, K, stride_am, stride_ak)
        y = tl.dot(a, load_tile(b_ptr, k, n, K, N, stride_bk, stride_bn), y, input_precision=PRECISION)
    y = alpha * y
    if ADD:
        y += beta * load_tile(c_ptr, m, n, M, N, stride_cm, 1).to(tl.float32)
    mask = (m[:, None] < M) & (n[None, :] < N)
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def product(a, b, alpha, c=None, beta=0.0):
    """alpha A B, plus beta C if there is one; A and B may be views of any strides."""
    (M, K), N, tiles = a.shape, b.shape[1], tiling(a)
    y = torch.empty((M, N), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(M, tiles["BLOCK"]), triton.cdiv(N, tiles["BLOCK"]))
    stride_cm = N if c is not None and c.dim() == 2 else 0
    addmm_kernel[grid](
        a, b, c, y, M, N, K, *a.stride(), *b.stride(), stride_cm, alpha, beta, ADD=c is not None, **tiles
    )
    return y


@autodiff(inputs_require_grad=(0, 1, 2))
def addmm(c, a, b, alpha=1.0, beta=1.0):
    """c: (M, N) or (N); a: (M, K); b: (K, N); gives (M, N)."""
    M, N = a.shape[0], b.shape[1]
    if a.shape[1] != b.shape[0] or c.shape not in ((M, N), (N,)):
        raise ValueError(f"c {tuple(c.shape)}, a {tuple(a.shape)} and b {tuple(b.shape)} do not fit")
    return product(a, b, float(alpha), c.contiguous(), float(beta))


def reference(c, a, b, alpha=1.0, beta=1.0):
    return alpha * a @ b + beta * c


SWEEP = [{"M": 4096, "K": 2048, "N": 2048, "ROWS": 2}, {"M": 4095, "K": 1000, "N": 3000, "ROWS": 1}]
SWEEP_CPU = [{"M": 27, "K": 33, "N": 42, "ROWS": 2}, {"M": 135, "K": 9, "N": 20, "ROWS": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, K, N = dims["M"], dims["K"], dims["N"]
    c = torch.randn(*((N,) if dims["ROWS"] == 1 else (M, N)), device=device, dtype=dtype)
    a = torch.randn(M, K, device=device, dtype=dtype) / max(1, K) ** 0.5
    return (c, a, torch.randn(K, N, device=device, dtype=dtype)), {"alpha": 0.7, "beta": 1.3}


# ---- backward ----

PART = 128  # rows of one partial sum


@triton.jit
def scale_kernel(dy_ptr, dc_ptr, size, beta, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dc = beta * tl.load(dy_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(dc_ptr + i, dc.to(dc_ptr.dtype.element_ty), mask=i < size)


@triton.jit
def row_part_kernel(
    dy_ptr, slots_ptr, M, N, PART: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, PART, BLOCK_M):
        m = tl.program_id(0) * PART + start + tl.arange(0, BLOCK_M)
        total += load_tile(dy_ptr, m, n, M, N, N, 1).to(tl.float32)
    tl.store(slots_ptr + tl.program_id(0).to(tl.int64) * N + n, tl.sum(total, axis=0), mask=n < N)


@triton.jit
def sum_slots_kernel(slots_ptr, dc_ptr, slots, N, beta, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dc = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(slots):
        dc += tl.load(slots_ptr + slot * N + n, mask=n < N, other=0.0)
    tl.store(dc_ptr + n, (beta * dc).to(dc_ptr.dtype.element_ty), mask=n < N)


def added_gradient(dy, shape, dtype, beta):
    """dC in its own shape."""
    (M, N), dc = dy.shape, torch.empty(shape, device=dy.device, dtype=dtype)
    if len(shape) == 2:
        scale_kernel[(triton.cdiv(M * N, 1024),)](dy, dc, M * N, beta, BLOCK=1024)
        return dc
    parts = triton.cdiv(M, PART)
    slots = torch.empty((parts, N), device=dy.device, dtype=torch.float32)
    row_part_kernel[(parts, triton.cdiv(N, 64))](dy, slots, M, N, PART=PART, BLOCK_M=32, BLOCK_N=64)
    sum_slots_kernel[(triton.cdiv(N, 64),)](slots, dc, parts, N, beta, BLOCK=64)
    return dc


class AddMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c, a, b, alpha, beta):
        ctx.save_for_backward(a, b)
        ctx.c_shape, ctx.c_dtype = c.shape, c.dtype
        ctx.alpha, ctx.beta = float(alpha), float(beta)
        return addmm(c, a, b, alpha, beta)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        dc = added_gradient(dy, ctx.c_shape, ctx.c_dtype, ctx.beta) if needs[0] else None
        da = product(dy, b.t(), ctx.alpha) if needs[1] else None
        db = product(a.t(), dy, ctx.alpha) if needs[2] else None
        return dc, da, db, None, None


def addmm_autograd(c, a, b, alpha=1.0, beta=1.0):
    return AddMM.apply(c, a, b, alpha, beta)

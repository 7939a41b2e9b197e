"""Product of two dense matrices, computed at chosen blocks alone.

Forward    for a nonzero block z at block row r and block column c of a layout:  C_z = A_r B_c,
           A_r a block of rows of A (H, M, K), B_c a block of columns of B (H, K, N)
Backward   dA_r = sum of dC_z B_c^T over the blocks z of row r,
           dB_c = sum of A_r^T dC_z over the blocks z of column c

Forward schedule: a program owns a nonzero block of one head and walks K; what is zero costs nothing.
Backward schedule: now a dense result is summed over a sparse operand. The blocks of a row lie in a run of the
list, so dA's owner (block row, tile of K) walks its run. The blocks of a column lie anywhere: a stable sort
of the columns makes the same list by columns, once for all heads, and dB's owner walks its run of that. Each
tile is stored once, also by owners of empty rows and columns, who store zeros; no atomics, and the order of
every sum is fixed.

op: blocksparse_sdd
schedule: segment_gather, swap_owner
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SIDE = 32  # of a block


def precision():
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def blocks_of(layout):
    return tuple(numbers.contiguous() for numbers in layout.nonzero(as_tuple=True))


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
def sdd_kernel(a_ptr, b_ptr, row_ptr, col_ptr, c_ptr, M, N, K, PRECISION: tl.constexpr, SIDE: tl.constexpr):
    z, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, SIDE)
    rows, cols = tl.load(row_ptr + z) * SIDE + lane, tl.load(col_ptr + z) * SIDE + lane
    c = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for start in range(0, K, SIDE):
        k = start + lane
        a = load_tile(a_ptr + head * M * K, rows, k, M, K)
        c = tl.dot(a, load_tile(b_ptr + head * K * N, k, cols, K, N), c, input_precision=PRECISION)
    store_tile(c_ptr + (head * tl.num_programs(0) + z) * SIDE * SIDE, c, lane, lane, SIDE, SIDE)


@autodiff(inputs_require_grad=(0, 1))
def blocksparse_product(a, b, layout):
    """a: (H, M, K); b: (H, K, N); layout: bool (M / 32, N / 32), rounded up; gives (H, blocks, 32, 32), by
    rows of the layout; what a block has beyond M or N is 0."""
    (H, M, K), N = a.shape, b.shape[2]
    if b.shape[:2] != (H, K) or layout.shape != (triton.cdiv(M, SIDE), triton.cdiv(N, SIDE)):
        raise ValueError(f"a {tuple(a.shape)}, b {tuple(b.shape)}, layout {tuple(layout.shape)} do not fit")
    row, col = blocks_of(layout)
    c = torch.empty((H, row.numel(), SIDE, SIDE), device=a.device, dtype=a.dtype)
    sdd_kernel[(row.numel(), H)](
        a.contiguous(), b.contiguous(), row, col, c, M, N, K, PRECISION=precision(), SIDE=SIDE
    )
    return c


def reference(a, b, layout):
    rows, cols = layout.shape
    c = torch.nn.functional.pad(a @ b, (0, cols * SIDE - b.shape[2], 0, rows * SIDE - a.shape[1]))
    return c.view(-1, rows, SIDE, cols, SIDE).transpose(2, 3)[:, layout]


SWEEP = [{"H": 4, "M": 4096, "N": 4096, "K": 128}, {"H": 3, "M": 1000, "N": 2001, "K": 200}]
SWEEP_CPU = [{"H": 2, "M": 70, "N": 100, "K": 24}, {"H": 1, "M": 33, "N": 64, "K": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """A quarter of the blocks."""
    H, M, N, K = (dims[name] for name in "HMNK")
    a = torch.randn(H, M, K, device=device, dtype=dtype)
    b = torch.randn(H, K, N, device=device, dtype=dtype) / max(1, K) ** 0.5
    return a, b, torch.rand(triton.cdiv(M, SIDE), triton.cdiv(N, SIDE), device=device) < 0.25


# ---- backward ----


@triton.jit
def da_kernel(
    b_ptr, dc_ptr, first_ptr, col_ptr, da_ptr, M, N, K, nnz, PRECISION: tl.constexpr, SIDE: tl.constexpr
):
    r, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, SIDE)
    k = tl.program_id(1) * SIDE + lane
    da = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for z in range(tl.load(first_ptr + r), tl.load(first_ptr + r + 1)):
        cols = tl.load(col_ptr + z) * SIDE + lane
        dc = load_tile(dc_ptr + (head * nnz + z) * SIDE * SIDE, lane, lane, SIDE, SIDE)
        b = load_tile(b_ptr + head * K * N, k, cols, K, N)
        da = tl.dot(dc, tl.trans(b), da, input_precision=PRECISION)
    store_tile(da_ptr + head * M * K, da, r * SIDE + lane, k, M, K)


@triton.jit
def db_kernel(
    a_ptr, dc_ptr, first_ptr, place_ptr, row_ptr, db_ptr, M, N, K, nnz,
    PRECISION: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """place: the blocks' numbers, by columns."""
    c, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, SIDE)
    k = tl.program_id(1) * SIDE + lane
    db = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for i in range(tl.load(first_ptr + c), tl.load(first_ptr + c + 1)):
        z = tl.load(place_ptr + i)
        rows = tl.load(row_ptr + z) * SIDE + lane
        dc = load_tile(dc_ptr + (head * nnz + z) * SIDE * SIDE, lane, lane, SIDE, SIDE)
        a = load_tile(a_ptr + head * M * K, rows, k, M, K)
        db = tl.dot(tl.trans(a), dc, db, input_precision=PRECISION)
    store_tile(db_ptr + head * K * N, db, k, c * SIDE + lane, K, N)


def first_of(sorted_numbers, count):
    """Where the run of each number below count begins, and the end of all."""
    return torch.searchsorted(sorted_numbers, torch.arange(count + 1, device=sorted_numbers.device))


class BlocksparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, layout):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b, layout)
        return blocksparse_product(a, b, layout)

    @staticmethod
    def backward(ctx, dc):
        a, b, layout = ctx.saved_tensors
        (H, M, K), N, dc = a.shape, b.shape[2], dc.contiguous()
        row, col = blocks_of(layout)
        sizes, tiles = (M, N, K, row.numel()), {"PRECISION": precision(), "SIDE": SIDE}
        da = db = None
        if ctx.needs_input_grad[0]:
            da, first = torch.empty_like(a), first_of(row, layout.shape[0])
            da_kernel[(layout.shape[0], triton.cdiv(K, SIDE), H)](b, dc, first, col, da, *sizes, **tiles)
        if ctx.needs_input_grad[1]:
            by_column, place = col.sort(stable=True)
            db, first = torch.empty_like(b), first_of(by_column, layout.shape[1])
            db_kernel[(layout.shape[1], triton.cdiv(K, SIDE), H)](
                a, dc, first, place, row, db, *sizes, **tiles
            )
        return da, db, None


def blocksparse_product_autograd(a, b, layout):
    return BlocksparseProduct.apply(a, b, layout)

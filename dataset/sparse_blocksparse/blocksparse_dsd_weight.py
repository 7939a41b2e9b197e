"""Linear layer whose weight has only some of its blocks: block-sparse training after pruning.

Forward    W (K, N) has the block V_z at (block row r_z, block column c_z) of a layout, zeros elsewhere;
           y = x W:  the columns c of y are  sum over the z with c_z = c of x[:, block r_z] V_z
Backward   dx's columns r are  sum over the z with r_z = r of dy[:, block c_z] V_z^T;
           dV_z = x[:, block r_z]^T dy[:, block c_z], and nothing for blocks that are not there

Forward schedule: a program owns (tile of rows, block column) and walks the blocks of its column, by a list
sorted by columns.
Backward schedule: dx is the same walk with the roles of rows and columns exchanged, and so the same kernel:
told to turn each block, and given the list in its own order, which is by rows. dV has an owner for each
stored block, who walks the rows of x and dy: dense operands, a sparse result. With a tenth of the blocks
that is a tenth of a dense layer's products; making dW whole and masking it would be all of them.

op: blocksparse_linear
schedule: swap_owner, segment_gather
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SIDE = 32  # of a block


def tiling(x):
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return {"PRECISION": PRECISION, "BLOCK_M": 64 if x.dtype == torch.float32 else 128, "SIDE": SIDE}


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None].to(tl.int64) * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def walk_blocks_kernel(
    x_ptr, v_ptr, first_ptr, place_ptr, source_ptr, y_ptr, M, K, N,
    TURN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """y (M, N) from x (M, K): a block of y's columns has the blocks place[first .. next first], and block z
    reads the columns source[z] of x."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    out, lane = tl.program_id(1), tl.arange(0, SIDE)
    y = tl.zeros([BLOCK_M, SIDE], dtype=tl.float32)
    for i in range(tl.load(first_ptr + out), tl.load(first_ptr + out + 1)):
        z = tl.load(place_ptr + i)
        x = load_tile(x_ptr, m, tl.load(source_ptr + z) * SIDE + lane, M, K)
        v = load_tile(v_ptr + z * SIDE * SIDE, lane, lane, SIDE, SIDE)
        if TURN:
            v = tl.trans(v)
        y = tl.dot(x, v, y, input_precision=PRECISION)
    n = out * SIDE + lane
    mask = (m[:, None] < M) & (n[None, :] < N)
    offs = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def walk_blocks(x, values, out, source, width, turn):
    """out: the block of columns of the result that each block belongs to."""
    M, K = x.shape
    y, tiles = torch.empty((M, width), device=x.device, dtype=x.dtype), tiling(x)
    ordered, place = out.sort(stable=True)
    count = triton.cdiv(width, SIDE)
    first = torch.searchsorted(ordered, torch.arange(count + 1, device=x.device))
    grid = (triton.cdiv(M, tiles["BLOCK_M"]), count)
    walk_blocks_kernel[grid](x, values, first, place, source, y, M, K, width, TURN=turn, **tiles)
    return y


@autodiff(inputs_require_grad=(0, 1))
def blocksparse_linear(x, values, row, col, N):
    """x: (M, K); values: (blocks, 32, 32); row, col: int64 (blocks), their places; gives (M, N)."""
    if values.shape[1:] != (SIDE, SIDE) or row.shape != values.shape[:1] or col.shape != row.shape:
        raise ValueError(f"blocks {tuple(values.shape)} at {tuple(row.shape)}, {tuple(col.shape)}")
    return walk_blocks(x.contiguous(), values.contiguous(), col, row.contiguous(), N, False)


def reference(x, values, row, col, N):
    K = x.shape[1]
    rows, cols = triton.cdiv(K, SIDE), triton.cdiv(N, SIDE)
    w = values.new_zeros(rows, cols, SIDE, SIDE).index_put((row, col), values)
    w = w.transpose(1, 2).reshape(rows * SIDE, cols * SIDE)
    return x @ w[:K, :N]


SWEEP = [{"M": 8192, "K": 4096, "N": 4096}, {"M": 3001, "K": 1100, "N": 2050}]
SWEEP_CPU = [{"M": 35, "K": 100, "N": 70}, {"M": 70, "K": 33, "N": 160}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """About an eighth of the blocks."""
    M, K, N = (dims[name] for name in "MKN")
    grid = (triton.cdiv(K, SIDE), triton.cdiv(N, SIDE))
    chosen = torch.randperm(grid[0] * grid[1], device=device)[: 1 + grid[0] * grid[1] // 8].sort().values
    chosen = chosen[: grid[0] * grid[1]]
    row, col = chosen // max(1, grid[1]), chosen % max(1, grid[1])
    values = torch.randn(chosen.numel(), SIDE, SIDE, device=device, dtype=dtype) / max(1, K / 8) ** 0.5
    return torch.randn(M, K, device=device, dtype=dtype), values, row, col, N


# ---- backward ----


@triton.jit
def block_grad_kernel(
    x_ptr, dy_ptr, row_ptr, col_ptr, dv_ptr, M, K, N,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    z, lane = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    k, n = tl.load(row_ptr + z) * SIDE + lane, tl.load(col_ptr + z) * SIDE + lane
    dv = tl.zeros([SIDE, SIDE], dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        x = tl.trans(load_tile(x_ptr, m, k, M, K))
        dv = tl.dot(x, load_tile(dy_ptr, m, n, M, N), dv, input_precision=PRECISION)
    at = dv_ptr + z * SIDE * SIDE + lane[:, None] * SIDE + lane[None, :]
    tl.store(at, dv.to(dv_ptr.dtype.element_ty))


class BlocksparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values, row, col, N):
        x, values, row, col = x.contiguous(), values.contiguous(), row.contiguous(), col.contiguous()
        ctx.save_for_backward(x, values, row, col)
        return blocksparse_linear(x, values, row, col, N)

    @staticmethod
    def backward(ctx, dy):
        x, values, row, col = ctx.saved_tensors
        (M, K), dy, dx, dv = x.shape, dy.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            dx = walk_blocks(dy, values, row, col, K, True)
        if ctx.needs_input_grad[1]:
            dv = torch.empty_like(values)
            block_grad_kernel[(values.shape[0],)](x, dy, row, col, dv, M, K, dy.shape[1], **tiling(x))
        return dx, dv, None, None, None


def blocksparse_linear_autograd(x, values, row, col, N):
    return BlocksparseLinear.apply(x, values, row, col, N)

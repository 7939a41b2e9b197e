"""Addition of an outer product: one number for each row times one for each column.

Forward    y_ij = x_ij + v a_i b_j,  v a constant
Backward   dx = dy,  da_i = v sum_j dy_ij b_j,  db_j = v sum_i dy_ij a_i

Forward schedule: 2D tiles; the product exists in registers alone.
Backward schedule: dy is reduced in both directions, and reading it twice, once for each, is what two owners
would do. A program owns a block of rows with all of their columns: walking them it adds what each tile gives
da to a vector of the rows, which is complete at the end, and what it gives db to the block's row of partials,
stored tile by tile. A second kernel adds the blocks. So one read of dy serves both sums, and the copy that dx
is, as gradients do not share memory with the upstream.

op: addcmul
schedule: row_reduce_correct, partials_then_reduce
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_M": 16, "BLOCK_N": 128}


@triton.jit
def addcmul_kernel(x_ptr, a_ptr, b_ptr, y_ptr, M, N, v, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (i[:, None] < M) & (j[None, :] < N)
    offs = i[:, None] * N + j[None, :]
    a = tl.load(a_ptr + i, mask=i < M, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + j, mask=j < N, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, (x + v * a[:, None] * b[None, :]).to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def addcmul(x, a, b, v=0.5):
    """x: (M, N); a: (M, 1); b: (1, N)."""
    M, N = x.shape
    if a.shape != (M, 1) or b.shape != (1, N):
        raise ValueError("a is a column and b a row for x")
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, TILE["BLOCK_M"]), triton.cdiv(N, TILE["BLOCK_N"]))
    addcmul_kernel[grid](x.contiguous(), a.contiguous(), b.contiguous(), y, M, N, v, **TILE)
    return y


def reference(x, a, b, v=0.5):
    return torch.addcmul(x, a, b, value=v)


SWEEP = [{"M": 16384, "N": 4096}, {"M": 8191, "N": 1001}]
SWEEP_CPU = [{"M": 37, "N": 41}, {"M": 9, "N": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    M, N = dims["M"], dims["N"]
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in ((M, N), (M, 1), (1, N)))


# ---- backward ----


@triton.jit
def addcmul_backward_kernel(
    a_ptr, b_ptr, dy_ptr, dx_ptr, da_ptr, part_ptr, M, N, v, NEEDS_DX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    a = tl.load(a_ptr + i, mask=i < M, other=0.0).to(tl.float32)
    da = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        mask = (i[:, None] < M) & (j[None, :] < N)
        offs = i[:, None] * N + j[None, :]
        b = tl.load(b_ptr + j, mask=j < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0)
        if NEEDS_DX:
            tl.store(dx_ptr + offs, dy, mask=mask)
        da += dy.to(tl.float32) * b[None, :]
        tl.store(part_ptr + block * N + j, tl.sum(dy.to(tl.float32) * a[:, None], axis=0), mask=j < N)
    tl.store(da_ptr + i, (v * tl.sum(da, axis=1)).to(da_ptr.dtype.element_ty), mask=i < M)


@triton.jit
def column_sum_kernel(part_ptr, db_ptr, blocks, N, v, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr):
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
    for start in range(0, blocks, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        mask = (g[:, None] < blocks) & (j[None, :] < N)
        total += tl.load(part_ptr + g[:, None].to(tl.int64) * N + j[None, :], mask=mask, other=0.0)
    tl.store(db_ptr + j, (v * tl.sum(total, axis=0)).to(db_ptr.dtype.element_ty), mask=j < N)


class AddCMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, v):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        ctx.v = v
        return addcmul(x, a, b, v)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        M, N, needs = a.numel(), b.numel(), ctx.needs_input_grad
        dx = torch.empty((M, N), device=dy.device, dtype=dy.dtype) if needs[0] else None
        da, db, blocks = torch.empty_like(a), None, triton.cdiv(M, TILE["BLOCK_M"])
        part = torch.empty((blocks, N), device=dy.device, dtype=torch.float32)
        addcmul_backward_kernel[(blocks,)](
            a, b, dy.contiguous(), dx, da, part, M, N, ctx.v, NEEDS_DX=needs[0], **TILE
        )
        if needs[2]:
            db = torch.empty_like(b)
            column_sum_kernel[(triton.cdiv(N, 64),)](part, db, blocks, N, ctx.v, BLOCK_G=16, BLOCK_N=64)
        return dx, da if needs[1] else None, db, None


def addcmul_autograd(x, a, b, v=0.5):
    return AddCMul.apply(x, a, b, v)

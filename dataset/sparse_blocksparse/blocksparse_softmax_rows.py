"""Softmax over the stored blocks of each row of a block-sparse matrix of scores.

Forward    for a row i of block row r:  y_zij = exp(s x_zij - lse_i),
           lse_i = log sum of exp(s x_zij) over the blocks z of r and their columns j;
           blocks that are not stored count as -infinity
Backward   with D_i = sum over z, j of y_zij dy_zij:  dx_zij = s y_zij (dy_zij - D_i)

Forward schedule: a program owns a block row of one head, whose blocks lie one after another. Its first walk
keeps a running maximum and sum for each row of a block, its second one stores.
Backward schedule: a row's correction needs all of its blocks and no other row's, so the owner stays. It
walks its blocks twice: once for D, as a product and a row sum, once to write dx; the second walk finds y and
dy of up to a dozen blocks in the cache. x and lse are not saved: y says it all.

op: blocksparse_softmax
schedule: row_reduce_correct
difficulty: 3
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


SIDE = 32  # of a block


@triton.jit
def load_block(ptr, z, SIDE: tl.constexpr):
    lane = tl.arange(0, SIDE)
    return tl.load(ptr + z * SIDE * SIDE + lane[:, None] * SIDE + lane[None, :]).to(tl.float32)


@triton.jit
def store_block(ptr, z, value, SIDE: tl.constexpr):
    lane = tl.arange(0, SIDE)
    at = ptr + z * SIDE * SIDE + lane[:, None] * SIDE + lane[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty))


@triton.jit
def softmax_kernel(x_ptr, first_ptr, y_ptr, nnz, scale, SIDE: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64) * nnz
    begin, end = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    m = tl.full([SIDE], -float("inf"), dtype=tl.float32)
    total = tl.zeros([SIDE], dtype=tl.float32)
    for z in range(begin, end):
        x = scale * load_block(x_ptr, head + z, SIDE)
        m_new = tl.maximum(m, tl.max(x, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new[:, None]), axis=1)
        m = m_new
    for z in range(begin, end):
        x = scale * load_block(x_ptr, head + z, SIDE)
        store_block(y_ptr, head + z, tl.exp(x - m[:, None]) / total[:, None], SIDE)


@autodiff(inputs_require_grad=(0,))
def blocksparse_softmax(x, first, scale=1.0):
    """x: (H, blocks, 32, 32), by block rows; first: int64 (block rows + 1), where each begins."""
    if x.shape[2:] != (SIDE, SIDE):
        raise ValueError(f"x {tuple(x.shape)} has no blocks of {SIDE} by {SIDE}")
    x, first = x.contiguous(), first.contiguous()
    y = torch.empty_like(x)
    softmax_kernel[(first.numel() - 1, x.shape[0])](x, first, y, x.shape[1], scale, SIDE=SIDE)
    return y


def reference(x, first, scale=1.0):
    rows = []
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        wide = x[:, begin:end].transpose(1, 2).flatten(2)  # (H, 32, blocks of the row * 32)
        y = torch.softmax(scale * wide, dim=-1).unflatten(2, (end - begin, SIDE))
        rows.append(y.transpose(1, 2))
    return torch.cat(rows, dim=1)


SWEEP = [{"H": 16, "rows": 128, "blocks": 4096}, {"H": 5, "rows": 67, "blocks": 601}]
SWEEP_CPU = [{"H": 2, "rows": 3, "blocks": 5}, {"H": 1, "rows": 4, "blocks": 13}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Rows of all lengths, some without a block."""
    H, rows, blocks = dims["H"], dims["rows"], dims["blocks"]
    row = torch.randint(0, rows, (blocks,), device=device).sort().values
    first = torch.searchsorted(row, torch.arange(rows + 1, device=device))
    return torch.randn(H, blocks, SIDE, SIDE, device=device, dtype=dtype), first, 0.5


# ---- backward ----


@triton.jit
def softmax_backward_kernel(y_ptr, dy_ptr, first_ptr, dx_ptr, nnz, scale, SIDE: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64) * nnz
    begin, end = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    D = tl.zeros([SIDE], dtype=tl.float32)
    for z in range(begin, end):
        D += tl.sum(load_block(y_ptr, head + z, SIDE) * load_block(dy_ptr, head + z, SIDE), axis=1)
    for z in range(begin, end):
        y, dy = load_block(y_ptr, head + z, SIDE), load_block(dy_ptr, head + z, SIDE)
        store_block(dx_ptr, head + z, scale * y * (dy - D[:, None]), SIDE)


class BlocksparseSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, scale):
        y = blocksparse_softmax(x, first, scale)
        ctx.save_for_backward(y, first.contiguous())
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, dy):
        y, first = ctx.saved_tensors
        dx = torch.empty_like(y)
        grid = (first.numel() - 1, y.shape[0])
        softmax_backward_kernel[grid](y, dy.contiguous(), first, dx, y.shape[1], ctx.scale, SIDE=SIDE)
        return dx, None, None


def blocksparse_softmax_autograd(x, first, scale=1.0):
    return BlocksparseSoftmax.apply(x, first, scale)

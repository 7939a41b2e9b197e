"""Symmetric contrastive loss of paired embeddings, with a learned scale.

Forward    Z = s A B^T,  l = (1 / 2M) sum_i (row_i + col_i - 2 Z_ii),  row_i = lse_j Z_ij,  col_j = lse_i Z_ij
Backward   G_ij = (dl / 2M) (exp(Z_ij - row_i) + exp(Z_ij - col_j) - 2 [i = j]);
           dA = s G B,  dB = s G^T A,  ds = sum_ij G_ij <a_i, b_j>

Forward schedule: one kernel, launched with (A, B) and with (B, A): a program owns a tile of rows, walks the
other side, and keeps an online log-sum-exp. Z is never stored. A single program adds the losses.
Backward schedule: G is symmetric in the roles of A and B, so one kernel again serves both: the owner of a
tile of rows rebuilds Z tile by tile and needs its own lse and the other side's. Rows and columns enter G
together, so two rebuilds give everything, without M x M memory or atomics; the first launch also leaves a
partial of ds a program.

op: clip_loss
schedule: swap_owner, partials_then_reduce, recompute_from_stats
difficulty: 5
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


def tiling(x):
    """Tiles and the precision of dots: products of whole float32 numbers want small tiles."""
    PRECISION = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    BLOCK_D = max(16, triton.next_power_of_2(x.shape[1]))
    BLOCK = 32 if x.dtype != torch.float32 or BLOCK_D <= 64 else 16
    return {"PRECISION": PRECISION, "BLOCK": BLOCK, "BLOCK_D": BLOCK_D, "num_warps": 8}


@triton.jit
def load_tile(ptr, rows, d, M, D):
    mask = (rows[:, None] < M) & (d[None, :] < D)
    return tl.load(ptr + rows[:, None].to(tl.int64) * D + d[None, :], mask=mask, other=0.0)


@triton.jit
def lse_kernel(
    own_ptr, other_ptr, scale_ptr, lse_ptr, diagonal_ptr, M, D,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    scale = tl.load(scale_ptr).to(tl.float32)
    own = load_tile(own_ptr, rows, d, M, D)
    m = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    diagonal = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        z = tl.dot(own, tl.trans(load_tile(other_ptr, cols, d, M, D)), input_precision=PRECISION) * scale
        diagonal += tl.sum(tl.where(cols[None, :] == rows[:, None], z, 0.0), axis=1)
        z = tl.where(cols[None, :] < M, z, -float("inf"))
        m_new = tl.maximum(m, tl.max(z, axis=1))
        total = total * tl.exp(m - m_new) + tl.sum(tl.exp(z - m_new[:, None]), axis=1)
        m = m_new
    tl.store(lse_ptr + rows, m + tl.log(total), mask=rows < M)
    tl.store(diagonal_ptr + rows, diagonal, mask=rows < M)


@triton.jit
def mean_loss_kernel(row_ptr, col_ptr, diagonal_ptr, loss_ptr, M, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(row_ptr + i, mask=i < M, other=0.0) + tl.load(col_ptr + i, mask=i < M, other=0.0)
        total -= 2 * tl.load(diagonal_ptr + i, mask=i < M, other=0.0)
    tl.store(loss_ptr, tl.sum(total, axis=0) / (2 * M))


def clip_loss_forward(a, b, scale):
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    M, D = a.shape
    if D > 512:
        raise ValueError(f"an embedding of {D} does not fit one tile")
    row, col, diagonal = (torch.empty(M, device=a.device, dtype=torch.float32) for _ in range(3))
    loss = torch.empty((), device=a.device, dtype=torch.float32)
    tiles = tiling(a)
    grid = (triton.cdiv(M, tiles["BLOCK"]),)
    lse_kernel[grid](a, b, scale, row, diagonal, M, D, **tiles)
    lse_kernel[grid](b, a, scale, col, diagonal, M, D, **tiles)
    mean_loss_kernel[(1,)](row, col, diagonal, loss, M, BLOCK=256)
    return loss, row, col


@autodiff(inputs_require_grad=(0, 1, 2))
def clip_loss(a, b, scale):
    """a, b: (M, D), row i of a paired with row i of b; scale: one number."""
    return clip_loss_forward(a.contiguous(), b.contiguous(), scale)[0]


def reference(a, b, scale):
    z = scale * a @ b.t()
    return (z.logsumexp(0) + z.logsumexp(1) - 2 * z.diagonal()).mean() / 2


SWEEP = [{"M": 8192, "D": 512}, {"M": 16384, "D": 256}, {"M": 5003, "D": 320}]
SWEEP_CPU = [{"M": 45, "D": 32}, {"M": 64, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, b = (
        torch.randn(dims["M"], dims["D"], device=device, dtype=dtype) / dims["D"] ** 0.5 for _ in range(2)
    )
    return a, b, torch.tensor(3.0, device=device, dtype=dtype)


# ---- backward ----


@triton.jit
def owner_kernel(
    own_ptr, other_ptr, scale_ptr, own_lse_ptr, other_lse_ptr, dloss_ptr, down_ptr, part_ptr, M, D,
    SCALE_GRAD: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    scale = tl.load(scale_ptr).to(tl.float32)
    weight = tl.load(dloss_ptr).to(tl.float32) / (2 * M)
    own = load_tile(own_ptr, rows, d, M, D)
    own_lse = tl.load(own_lse_ptr + rows, mask=rows < M, other=0.0)
    down = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    dscale = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, M, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        other = load_tile(other_ptr, cols, d, M, D)
        other_lse = tl.load(other_lse_ptr + cols, mask=cols < M, other=0.0)
        dots = tl.dot(own, tl.trans(other), input_precision=PRECISION)
        p = tl.exp(dots * scale - own_lse[:, None]) + tl.exp(dots * scale - other_lse[None, :])
        g = weight * (p - tl.where(cols[None, :] == rows[:, None], 2.0, 0.0))
        g = tl.where((rows[:, None] < M) & (cols[None, :] < M), g, 0.0)
        down = tl.dot(g.to(other.dtype), other, down, input_precision=PRECISION)
        if SCALE_GRAD:
            dscale += tl.sum(g * dots, axis=1)
    mask = (rows[:, None] < M) & (d[None, :] < D)
    down = (down * scale).to(down_ptr.dtype.element_ty)
    tl.store(down_ptr + rows[:, None] * D + d[None, :], down, mask=mask)
    if SCALE_GRAD:
        tl.store(part_ptr + tl.program_id(0), tl.sum(dscale, axis=0))


@triton.jit
def total_kernel(part_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, parts, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_ptr + i, mask=i < parts, other=0.0)
    tl.store(out_ptr, tl.sum(total, axis=0))


class ClipLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, scale):
        a, b = a.contiguous(), b.contiguous()
        loss, row, col = clip_loss_forward(a, b, scale)
        ctx.save_for_backward(a, b, scale, row, col)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        a, b, scale, row, col = ctx.saved_tensors
        M, D = a.shape
        tiles = tiling(a)
        owners = triton.cdiv(M, tiles["BLOCK"])
        part = torch.empty(owners, device=a.device, dtype=torch.float32)
        da = db = dscale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            da, dscale = torch.empty_like(a), torch.empty_like(scale)
            owner_kernel[(owners,)](a, b, scale, row, col, dloss, da, part, M, D, SCALE_GRAD=True, **tiles)
            total_kernel[(1,)](part, dscale, owners, BLOCK=128)
        if ctx.needs_input_grad[1]:
            db = torch.empty_like(b)
            owner_kernel[(owners,)](b, a, scale, col, row, dloss, db, part, M, D, SCALE_GRAD=False, **tiles)
        return da if ctx.needs_input_grad[0] else None, db, dscale if ctx.needs_input_grad[2] else None


def clip_loss_autograd(a, b, scale):
    return ClipLoss.apply(a, b, scale)

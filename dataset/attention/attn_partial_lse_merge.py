"""Merging attention over R sets of keys, each with its own output and log-sum-exp, into attention over all.

Forward    L = log sum_r exp(L_r),  w_r = exp(L_r - L),  O = sum_r w_r O_r          (a row of M, D columns)
Backward   dO_r = w_r dO.  w is a softmax of the L_r, and dL/dL_r = w_r:  with c_r = <dO, O_r>,
           dL_r = w_r (c_r - sum_u w_u c_u + dL)

Forward schedule: a program owns a tile of rows and walks the R parts, with a running maximum as in an online
softmax, so each part is read once. A part whose L_r is -inf, which saw no key of this row, weighs 0; one part
of each row must have seen some. O and L are outputs, so results of merges can be merged again.
Backward schedule: the same owner, one walk: each part is read once and each gradient written once, which is
the least traffic there can be. The sum over u couples the parts; <dO, O> with the saved output would give it
before the walk, but O is rounded to its dtype, and where the c_r are alike little else is left of their
differences. So the c_r of a row, one number a part, wait in registers for the end of the walk, O is not read,
and the gradients of all L_r are stored at once.

op: lse_merge
schedule: row_reduce_correct, recompute_from_stats
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def load_tile(ptr, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    return tl.load(ptr + rows[:, None] * C + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(ptr, value, rows, cols, R, C):
    mask = (rows[:, None] < R) & (cols[None, :] < C)
    tl.store(ptr + rows[:, None] * C + cols[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def lse_merge_kernel(
    o_parts_ptr, lse_parts_ptr, o_ptr, lse_ptr, R, M, D, size, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows, d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK], -1e30, dtype=tl.float32)  # finite: first parts may be -inf
    total = tl.zeros([BLOCK], dtype=tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for _ in range(R):
        lse = tl.load(lse_parts_ptr + rows, mask=rows < M, other=0.0)
        o = load_tile(o_parts_ptr, rows, d, M, D).to(tl.float32)
        m_new = tl.maximum(m, lse)
        rescale, e = tl.exp(m - m_new), tl.exp(lse - m_new)
        total = total * rescale + e
        acc = acc * rescale[:, None] + o * e[:, None]
        m = m_new
        lse_parts_ptr += M
        o_parts_ptr += size
    store_tile(o_ptr, acc / total[:, None], rows, d, M, D)
    tl.store(lse_ptr + rows, m + tl.log(total), mask=rows < M)


def tile(D):
    BLOCK_D = triton.next_power_of_2(D)
    return {"BLOCK": max(1, 4096 // BLOCK_D), "BLOCK_D": BLOCK_D}


@autodiff(inputs_require_grad=(0, 1))
def lse_merge(o_parts, lse_parts):
    """o_parts: (R, M, D), R from 1 to 64; lse_parts: float32 (R, M); gives o (M, D) and lse (M)."""
    o_parts, lse_parts = o_parts.contiguous(), lse_parts.contiguous()
    R, M, D = o_parts.shape
    if lse_parts.shape != (R, M) or not 0 < R <= 64 or D > 1024:
        raise ValueError("lse_parts does not fit o_parts, not 1 to 64 parts, or a row does not fit one tile")
    o, lse = torch.empty_like(o_parts[0]), torch.empty_like(lse_parts[0])
    shape = tile(D)
    lse_merge_kernel[(triton.cdiv(M, shape["BLOCK"]),)](o_parts, lse_parts, o, lse, R, M, D, M * D, **shape)
    return o, lse


def reference(o_parts, lse_parts):
    lse = torch.logsumexp(lse_parts, dim=0)
    return ((lse_parts - lse).exp()[..., None] * o_parts).sum(0), lse


SWEEP = [{"R": 8, "M": 32768, "D": 128}, {"R": 5, "M": 40007, "D": 72}]
SWEEP_CPU = [{"R": 4, "M": 21, "D": 16}, {"R": 2, "M": 150, "D": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    R, M, D = (dims[key] for key in ("R", "M", "D"))
    return torch.randn(R, M, D, device=device, dtype=dtype), torch.randn(R, M, device=device)


# ---- backward ----


@triton.jit
def lse_merge_backward_kernel(
    o_parts_ptr, lse_parts_ptr, lse_ptr, do_ptr, dlse_ptr, do_parts_ptr, dlse_parts_ptr, R, M, D, size,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    rows, d = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    parts = tl.arange(0, BLOCK_R)
    offs, mask = parts[None, :] * M + rows[:, None], (parts[None, :] < R) & (rows[:, None] < M)
    do = load_tile(do_ptr, rows, d, M, D).to(tl.float32)
    lse = tl.load(lse_ptr + rows, mask=rows < M, other=0.0)
    dlse = tl.load(dlse_ptr + rows, mask=rows < M, other=0.0)
    w = tl.exp(tl.load(lse_parts_ptr + offs, mask=mask, other=-float("inf")) - lse[:, None])
    c = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
    for r in range(R):
        own = parts[None, :] == r
        o_part = load_tile(o_parts_ptr, rows, d, M, D).to(tl.float32)
        c = tl.where(own, tl.sum(do * o_part, axis=1)[:, None], c)
        store_tile(do_parts_ptr, do * tl.sum(tl.where(own, w, 0.0), axis=1)[:, None], rows, d, M, D)
        o_parts_ptr += size
        do_parts_ptr += size
    shift = dlse - tl.sum(w * c, axis=1)
    tl.store(dlse_parts_ptr + offs, w * (c + shift[:, None]), mask=mask)


class LSEMerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o_parts, lse_parts):
        o_parts, lse_parts = o_parts.contiguous(), lse_parts.contiguous()
        o, lse = lse_merge(o_parts, lse_parts)
        ctx.save_for_backward(o_parts, lse_parts, lse)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        o_parts, lse_parts, lse = ctx.saved_tensors
        (R, M, D), shape = o_parts.shape, tile(o_parts.shape[2])
        grads = torch.empty_like(o_parts), torch.empty_like(lse_parts)
        lse_merge_backward_kernel[(triton.cdiv(M, shape["BLOCK"]),)](
            o_parts, lse_parts, lse, do.contiguous(), dlse.contiguous(), *grads, R, M, D, M * D,
            BLOCK_R=triton.next_power_of_2(R), **shape,
        )  # fmt: skip
        return tuple(g if needed else None for g, needed in zip(grads, ctx.needs_input_grad, strict=True))


def lse_merge_autograd(o_parts, lse_parts):
    return LSEMerge.apply(o_parts, lse_parts)

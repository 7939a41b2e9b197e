"""Sums of embeddings over bags of indices: the sparse features of a recommender.

Forward    y_b = sum over the entries i of bag b of W[idx_i]
Backward   dW[idx_i] += dy_b for every entry i, b its bag

Forward schedule: a program owns (bag, column tile) and walks the bag's entries in tiles, so that the rows of
a tile are loaded together.
Backward schedule: an entry adds a row that it did not compute, so bags need not stay whole: a program owns a
tile of entries and of columns, each entry finds its bag by bisection of the offsets, and dy_b goes to its row
by atomics in fp32. Bags of one and of a thousand entries give equal work, where the forward's owners would
make the longest bag the length of the launch; neighbouring entries share a bag, so dy comes from cache.
Tables of millions of rows are hit sparsely, and atomics on different rows do not wait for each other; for hot
rows sort the entries by row instead.

op: embedding_bag
schedule: atomic_accumulate
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


TILE = {"BLOCK_I": 16, "BLOCK_D": 64}


@triton.jit
def bag_sum_kernel(w_ptr, idx_ptr, offsets_ptr, y_ptr, D, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    end = tl.load(offsets_ptr + b + 1)
    y = tl.zeros([BLOCK_I, BLOCK_D], dtype=tl.float32)
    for start in range(tl.load(offsets_ptr + b), end, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        v = tl.load(idx_ptr + i, mask=i < end, other=0)
        mask = (i[:, None] < end) & (d[None, :] < D)
        y += tl.load(w_ptr + v[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + b * D + d, tl.sum(y, axis=0).to(y_ptr.dtype.element_ty), mask=d < D)


@autodiff(inputs_require_grad=(0,))
def embedding_bag(w, idx, offsets):
    """w: (V, D); idx: int64 (entries); offsets: int64 (bags + 1), from 0 to entries, not decreasing."""
    w, (bags, D) = w.contiguous(), (offsets.numel() - 1, w.shape[1])
    y = torch.empty((bags, D), device=w.device, dtype=w.dtype)
    grid = (bags, triton.cdiv(D, TILE["BLOCK_D"]))
    bag_sum_kernel[grid](w, idx.contiguous(), offsets.contiguous(), y, D, **TILE)
    return y


def reference(w, idx, offsets):
    bags = offsets.numel() - 1
    bag = torch.repeat_interleave(torch.arange(bags, device=w.device), offsets.diff())
    return w.new_zeros(bags, w.shape[1]).index_add(0, bag, w[idx])


SWEEP = [
    {"bags": 65536, "entries": 1310720, "V": 500000, "D": 64},
    {"bags": 4099, "entries": 90001, "V": 100003, "D": 150},
]
SWEEP_CPU = [{"bags": 19, "entries": 70, "V": 31, "D": 24}, {"bags": 2, "entries": 45, "V": 9, "D": 70}]


def make_args(dims, device="cuda", dtype=torch.float32):
    bags, entries = dims["bags"], dims["entries"] if dims["bags"] else 0
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    inner = torch.randint(0, entries + 1, (max(0, bags - 1),), device=device).sort().values
    offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((min(1, bags),), entries)])
    return w, torch.randint(0, dims["V"], (entries,), device=device), offsets


# ---- backward ----


@triton.jit
def scatter_kernel(
    idx_ptr, offsets_ptr, dy_ptr, dw_ptr, entries, bags, D,
    BITS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.zeros([BLOCK_I], dtype=tl.int64)
    for bit in tl.static_range(BITS):  # the last bag that begins at i or before
        later = b + (1 << (BITS - 1 - bit))
        begin = tl.load(offsets_ptr + later, mask=later < bags, other=0)
        b = tl.where((later < bags) & (begin <= i), later, b)
    v = tl.load(idx_ptr + i, mask=i < entries, other=0)
    mask = (i[:, None] < entries) & (d[None, :] < D)
    dy = tl.load(dy_ptr + b[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(dw_ptr + v[:, None] * D + d[None, :], dy, mask=mask, sem="relaxed")


class EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, idx, offsets):
        idx, offsets = idx.contiguous(), offsets.contiguous()
        ctx.save_for_backward(idx, offsets)
        ctx.w_shape = w.shape
        return embedding_bag(w, idx, offsets)

    @staticmethod
    def backward(ctx, dy):
        idx, offsets = ctx.saved_tensors
        (bags, D), entries = dy.shape, idx.numel()
        dw = torch.zeros(ctx.w_shape, device=dy.device, dtype=torch.float32)
        grid = (triton.cdiv(entries, TILE["BLOCK_I"]), triton.cdiv(D, TILE["BLOCK_D"]))
        scatter_kernel[grid](
            idx, offsets, dy.contiguous(), dw, entries, bags, D, BITS=(bags - 1).bit_length(), **TILE
        )
        return dw.to(dy.dtype), None, None


def embedding_bag_autograd(w, idx, offsets):
    return EmbeddingBag.apply(w, idx, offsets)

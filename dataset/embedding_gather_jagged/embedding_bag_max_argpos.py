"""Bags of embeddings reduced by a maximum for each column: set features in recommendation and point models.

Forward    y_bd = max over the entries i of bag b of W[idx_i, d], the first of equal ones; 0 for an empty bag
Backward   dW[v, d] = sum over the bags b whose winner for column d was row v of dy_bd

Forward schedule: a program owns (bag, column tile), walks the entries, and saves for each column which row of
the table won: the row, not the entry, as that is all that the gradient needs.
Backward schedule: a bag gives one number a column to one row, whatever its length, so nothing is left of its
entries: the backward does not see the index list at all. Columns of a bag go to different rows, so a sort by
row would have to be made for each column; instead a flat program owns a tile of (bag, column) and adds dy at
(winner, column) by atomics in fp32. Two meet only where two bags have the same winner for a column. Empty
bags have no winner and add nothing.

op: embedding_bag_max
schedule: index_or_seed_replay, atomic_accumulate
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def bag_max_kernel(w_ptr, idx_ptr, offsets_ptr, y_ptr, winner_ptr, D, BLOCK: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    winner = tl.full([BLOCK], -1, dtype=tl.int64)
    for i in range(tl.load(offsets_ptr + bag), tl.load(offsets_ptr + bag + 1)):
        v = tl.load(idx_ptr + i)
        w = tl.load(w_ptr + v * D + d, mask=d < D, other=0.0).to(tl.float32)
        wins = (w > best) | (winner < 0)
        best = tl.where(wins, w, best)
        winner = tl.where(wins, v, winner)
    y = tl.where(winner >= 0, best, 0.0)
    tl.store(y_ptr + bag * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)
    tl.store(winner_ptr + bag * D + d, winner.to(tl.int32), mask=d < D)


def bag_max_forward(w, idx, offsets):
    bags, D = offsets.numel() - 1, w.shape[1]
    y = torch.empty((bags, D), device=w.device, dtype=w.dtype)
    winner = torch.empty((bags, D), device=w.device, dtype=torch.int32)
    bag_max_kernel[(bags, triton.cdiv(D, 128))](w, idx, offsets, y, winner, D, BLOCK=128)
    return y, winner


@autodiff(inputs_require_grad=(0,))
def embedding_bag_max(w, idx, offsets):
    """w: (V, D); idx: int64 (entries); offsets: int64 (bags + 1), from 0 to entries, not decreasing."""
    return bag_max_forward(w.contiguous(), idx.contiguous(), offsets.contiguous())[0]


def reference(w, idx, offsets):
    bags, entries, rows = offsets.numel() - 1, idx.numel(), w[idx]
    bag = torch.repeat_interleave(torch.arange(bags, device=w.device), offsets.diff())
    index, zero = bag[:, None].expand(rows.shape), w.new_zeros(bags, w.shape[1])
    best = zero.scatter_reduce(0, index, rows.detach(), "amax", include_self=False)
    entry = torch.arange(entries, device=w.device)[:, None]
    wins = torch.where(rows == best[bag], entry, entries)
    first = torch.full_like(zero, entries, dtype=torch.int64).scatter_reduce(0, index, wins, "amin")
    return torch.cat([rows, w.new_zeros(1, w.shape[1])]).gather(0, first)


SWEEP = [
    {"bags": 65536, "entries": 655360, "V": 200000, "D": 128},
    {"bags": 9001, "entries": 70001, "V": 50021, "D": 300},
]
SWEEP_CPU = [{"bags": 11, "entries": 40, "V": 15, "D": 21}, {"bags": 3, "entries": 30, "V": 50, "D": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Entries of a bag differ in their rows as far as a bag is shorter than the table."""
    bags, entries, V = dims["bags"], dims["entries"], dims["V"]
    w = torch.randn(V, dims["D"], device=device, dtype=dtype)
    inner = torch.randint(0, entries + 1, (max(0, bags - 1),), device=device).sort().values
    offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((min(1, bags),), entries)])
    return w, torch.randint(0, V, (entries,), device=device), offsets


# ---- backward ----


@triton.jit
def route_kernel(winner_ptr, dy_ptr, dw_ptr, n, D, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    winner = tl.load(winner_ptr + at, mask=at < n, other=-1).to(tl.int64)
    dy = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.atomic_add(dw_ptr + winner * D + at % D, dy, mask=winner >= 0, sem="relaxed")


class EmbeddingBagMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, idx, offsets):
        y, winner = bag_max_forward(w.contiguous(), idx.contiguous(), offsets.contiguous())
        ctx.save_for_backward(winner)
        ctx.w_shape = w.shape
        return y

    @staticmethod
    def backward(ctx, dy):
        (winner,) = ctx.saved_tensors
        dw = torch.zeros(ctx.w_shape, device=dy.device, dtype=torch.float32)
        n = winner.numel()
        route_kernel[(triton.cdiv(n, 512),)](winner, dy.contiguous(), dw, n, dw.shape[1], BLOCK=512)
        return dw.to(dy.dtype), None, None


def embedding_bag_max_autograd(w, idx, offsets):
    return EmbeddingBagMax.apply(w, idx, offsets)

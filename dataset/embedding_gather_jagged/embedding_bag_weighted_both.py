"""Bags of embeddings, each entry with a weight of its own; gradients for the table and for the weights.

Forward    y_b = sum over the entries i of bag b of a_i W[idx_i]
Backward   da_i = <dy_b, W[idx_i]> with b the bag of i;
           dW_v = sum over the i with idx_i = v of a_i dy_{bag i}

Forward schedule: a program owns (bag, column tile) and walks the entries of the bag.
Backward schedule: the two gradients are summed along different axes, so they get two owners. da is summed
over columns: the bag keeps its program, which takes its entries 16 at a time, gathers their table rows and
dots them with the one dy_b, at hand in cache for all of them. dW is summed over entries: one argsort of the
indices turns entry -> row into row -> entries, and a program owns (row of W, column tile), gathers the
weighted dy_b of its entries and stores once. A row that many bags share costs no atomics, a row of no bag
gets its zero from an empty loop, and each kernel runs only where its gradient is wanted.

op: weighted_embedding_bag
schedule: segment_gather, swap_owner
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def bag_kernel(w_ptr, a_ptr, idx_ptr, offsets_ptr, y_ptr, D, BLOCK: tl.constexpr):
    bag = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.load(offsets_ptr + bag), tl.load(offsets_ptr + bag + 1)):
        row = tl.load(w_ptr + tl.load(idx_ptr + i) * D + cols, mask=cols < D, other=0.0)
        y += tl.load(a_ptr + i).to(tl.float32) * row.to(tl.float32)
    tl.store(y_ptr + bag * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@autodiff(inputs_require_grad=(0, 1))
def weighted_embedding_bag(w, a, idx, offsets):
    """w: (V, D); a: (entries); idx: int64 (entries); offsets: int64 (bags + 1), from 0 to entries."""
    w = w.contiguous()
    bags, D = offsets.numel() - 1, w.shape[1]
    y = torch.empty((bags, D), device=w.device, dtype=w.dtype)
    grid = (bags, triton.cdiv(D, 128))
    bag_kernel[grid](w, a.contiguous(), idx.contiguous(), offsets.contiguous(), y, D, BLOCK=128)
    return y


def reference(w, a, idx, offsets):
    bag = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=w.device), offsets.diff())
    y = torch.zeros((offsets.numel() - 1, w.shape[1]), device=w.device, dtype=w.dtype)
    return y.index_add(0, bag, a[:, None] * w[idx])


SWEEP = [
    {"bags": 16384, "entries": 327680, "V": 100000, "D": 128},
    {"bags": 4099, "entries": 50021, "V": 30001, "D": 300},
]
SWEEP_CPU = [{"bags": 13, "entries": 55, "V": 20, "D": 36}, {"bags": 2, "entries": 40, "V": 7, "D": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    bags, entries = dims["bags"], dims["entries"]
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    a = torch.rand(entries, device=device, dtype=dtype)
    inner = torch.randint(0, entries + 1, (bags - 1,), device=device).sort().values
    offsets = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), entries)])
    return w, a, torch.randint(0, dims["V"], (entries,), device=device), offsets


# ---- backward ----


@triton.jit
def entry_dot_kernel(
    w_ptr, dy_ptr, idx_ptr, offsets_ptr, da_ptr, D, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr
):
    bag = tl.program_id(0).to(tl.int64)
    end = tl.load(offsets_ptr + bag + 1)
    for start in range(tl.load(offsets_ptr + bag), end, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        v = tl.load(idx_ptr + i, mask=i < end, other=0)
        products = tl.zeros([BLOCK_I, BLOCK_D], dtype=tl.float32)
        for first in range(0, D, BLOCK_D):
            cols = first + tl.arange(0, BLOCK_D)
            mask = (i[:, None] < end) & (cols[None, :] < D)
            rows = tl.load(w_ptr + v[:, None] * D + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            dy = tl.load(dy_ptr + bag * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            products += rows * dy[None, :]
        tl.store(da_ptr + i, tl.sum(products, axis=1).to(da_ptr.dtype.element_ty), mask=i < end)


@triton.jit
def table_gather_kernel(
    a_ptr, dy_ptr, order_ptr, begin_ptr, bag_ptr, dw_ptr, D, BLOCK: tl.constexpr
):  # fmt: skip
    v = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(tl.load(begin_ptr + v), tl.load(begin_ptr + v + 1)):
        i = tl.load(order_ptr + position)
        dy = tl.load(dy_ptr + tl.load(bag_ptr + i) * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        dw += tl.load(a_ptr + i).to(tl.float32) * dy
    tl.store(dw_ptr + v * D + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < D)


class WeightedEmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, a, idx, offsets):
        w, a, idx, offsets = w.contiguous(), a.contiguous(), idx.contiguous(), offsets.contiguous()
        ctx.save_for_backward(w, a, idx, offsets)
        return weighted_embedding_bag(w, a, idx, offsets)

    @staticmethod
    def backward(ctx, dy):
        w, a, idx, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        (V, D), bags = w.shape, offsets.numel() - 1
        dw = da = None
        if ctx.needs_input_grad[1]:
            da = torch.empty_like(a)
            entry_dot_kernel[(bags,)](w, dy, idx, offsets, da, D, BLOCK_I=16, BLOCK_D=128)
        if ctx.needs_input_grad[0]:
            order = torch.argsort(idx, stable=True)
            begin = torch.searchsorted(idx[order], torch.arange(V + 1, device=idx.device))
            entries = torch.arange(idx.numel(), device=idx.device)
            bag = torch.searchsorted(offsets, entries, right=True) - 1
            dw = torch.empty_like(w)
            table_gather_kernel[(V, triton.cdiv(D, 128))](a, dy, order, begin, bag, dw, D, BLOCK=128)
        return dw, da, None, None


def weighted_embedding_bag_autograd(w, a, idx, offsets):
    return WeightedEmbeddingBag.apply(w, a, idx, offsets)

"""Embedding lookup with a backward that a frequent row cannot slow down.

Forward    y_i = W[idx_i]
Backward   dW_v = sum of dy_i over the i with idx_i = v

Forward schedule: a program owns (token, column tile) and copies.
Backward schedule: the tokens are sorted by row, and the sorted list is cut in runs of equal length, whatever
rows they hold. In text a few rows have a large share of all tokens; with an owner a row their programs would
run long after all others ended, and with atomics they would queue at one address. Here every program of (run,
column tile) walks as many tokens as every other. Where a row's segment lies inside the run, its sum is final
and stored. Only at the two ends of a run may a segment be cut: what came from the left goes to the run's
head slot, what begins here and goes on to its tail slot, in fp32. A second launch, again one program a run,
acts where a cut segment begins: it adds that run's tail to the heads of the runs that the segment reaches,
and stores the row. Each row is stored once, the order of its sum is fixed; rows of no token keep the zeros.

op: embedding
schedule: segment_gather, partials_then_reduce
difficulty: 4
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def embedding_kernel(w_ptr, idx_ptr, y_ptr, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(w_ptr + tl.load(idx_ptr + token) * D + cols, mask=cols < D, other=0.0)
    tl.store(y_ptr + token * D + cols, row, mask=cols < D)


@autodiff(inputs_require_grad=(0,))
def embedding(w, idx):
    """w: (V, D); idx: int64 of any shape."""
    w, idx = w.contiguous(), idx.contiguous()
    D = w.shape[1]
    y = torch.empty((*idx.shape, D), device=w.device, dtype=w.dtype)
    embedding_kernel[(idx.numel(), triton.cdiv(D, 256))](w, idx, y, D, BLOCK=256)
    return y


def reference(w, idx):
    return w[idx]


SWEEP = [{"N": 65536, "V": 50257, "D": 768}, {"N": 20011, "V": 32000, "D": 1000}]
SWEEP_CPU = [{"N": 200, "V": 7, "D": 16}, {"N": 150, "V": 90, "D": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    frequent_first = torch.rand(dims["N"], device=device) ** 4
    return w, (dims["V"] * frequent_first).long().clamp(max=dims["V"] - 1)


# ---- backward ----

RUN = 32  # tokens


@triton.jit
def run_kernel(
    dy_ptr, order_ptr, key_ptr, dw_ptr, head_ptr, tail_ptr, N, D, RUN: tl.constexpr, BLOCK: tl.constexpr
):
    run = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    first = run * RUN
    last = tl.minimum(first + RUN, N)
    inside = tl.load(key_ptr + first - 1, mask=first > 0, other=-1) != tl.load(key_ptr + first)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(first, last):
        key = tl.load(key_ptr + position)
        token = tl.load(order_ptr + position)
        acc += tl.load(dy_ptr + token * D + cols, mask=mask, other=0.0).to(tl.float32)
        ends = tl.load(key_ptr + position + 1, mask=position + 1 < N, other=-1) != key
        tl.store(dw_ptr + key * D + cols, acc.to(dw_ptr.dtype.element_ty), mask=mask & ends & inside)
        tl.store(head_ptr + run * D + cols, acc, mask=mask & ends & (inside == 0))
        acc = tl.where(ends, 0.0, acc)
        inside = inside | ends
    goes_on = tl.load(key_ptr + last, mask=last < N, other=-1) == tl.load(key_ptr + last - 1)
    tl.store(tail_ptr + run * D + cols, acc, mask=mask & goes_on & inside)
    tl.store(head_ptr + run * D + cols, acc, mask=mask & goes_on & (inside == 0))


@triton.jit
def merge_kernel(
    key_ptr, begin_ptr, end_ptr, dw_ptr, head_ptr, tail_ptr, N, D,
    RUN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = run * RUN
    last = tl.minimum(first + RUN, N)
    end = tl.load(end_ptr + run)  # of the segment that the run ends in
    if (tl.load(begin_ptr + run) >= first) & (end > last):
        reached = (end - 1) // RUN
        total = tl.zeros([BLOCK_R, BLOCK], dtype=tl.float32)
        for start in range(run + 1, reached + 1, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            mask = (r[:, None] <= reached) & (cols[None, :] < D)
            total += tl.load(head_ptr + r[:, None] * D + cols[None, :], mask=mask, other=0.0)
        dw = tl.load(tail_ptr + run * D + cols, mask=cols < D, other=0.0) + tl.sum(total, axis=0)
        row = tl.load(key_ptr + last - 1)
        tl.store(dw_ptr + row * D + cols, dw.to(dw_ptr.dtype.element_ty), mask=cols < D)


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, idx):
        idx = idx.contiguous()
        ctx.save_for_backward(idx)
        ctx.w_shape, ctx.w_dtype = w.shape, w.dtype
        return embedding(w, idx)

    @staticmethod
    def backward(ctx, dy):
        (idx,) = ctx.saved_tensors
        dy = dy.contiguous()
        N, D = idx.numel(), ctx.w_shape[1]
        key, order = idx.view(-1).sort(stable=True)
        runs = triton.cdiv(N, RUN)
        ends = key[torch.arange(1, runs + 1, device=key.device).mul(RUN).clamp(max=N) - 1]
        begin, end = torch.searchsorted(key, ends), torch.searchsorted(key, ends, right=True)
        dw = torch.zeros(ctx.w_shape, device=dy.device, dtype=ctx.w_dtype)
        head, tail = torch.empty((2, runs, D), device=dy.device, dtype=torch.float32)
        run_kernel[(runs, triton.cdiv(D, 256))](dy, order, key, dw, head, tail, N, D, RUN=RUN, BLOCK=256)
        merge_kernel[(runs, triton.cdiv(D, 64))](
            key, begin, end, dw, head, tail, N, D, RUN=RUN, BLOCK_R=32, BLOCK=64
        )
        return dw, None


def embedding_autograd(w, idx):
    return Embedding.apply(w, idx)

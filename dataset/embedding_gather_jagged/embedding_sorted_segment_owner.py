"""Embedding lookup with a backward free of atomics.

Forward    y_i = W[idx_i]
Backward   dW_v = sum of dy_i over the i with idx_i = v

Forward schedule: a program owns (token, column tile) and copies.
Backward schedule: the map token -> row is inverted on the host side by one argsort: the tokens of row v lie
at begin[v] .. begin[v + 1] of the sorted order. A program owns (row of W, column tile), gathers the dy rows
of its segment and stores once. Absent rows get an empty loop and a zero. Deterministic, every dW element
written exactly once, in the final dtype, with no zero fill and no cast pass.

op: embedding
schedule: segment_gather
difficulty: 2
dtypes: fp32, fp16, bf16
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
    v = tl.load(idx_ptr + token)
    tl.store(y_ptr + token * D + cols, tl.load(w_ptr + v * D + cols, mask=cols < D, other=0.0), mask=cols < D)


@autodiff(inputs_require_grad=(0,))
def embedding(w, idx):
    """w: (V, D); idx: int64 of any shape."""
    w, idx = w.contiguous(), idx.contiguous()
    D = w.shape[1]
    y = torch.empty((*idx.shape, D), device=w.device, dtype=w.dtype)
    embedding_kernel[(idx.numel(), triton.cdiv(D, 128))](w, idx, y, D, BLOCK=128)
    return y


def reference(w, idx):
    return w[idx]


SWEEP = [
    {"N": 16384, "V": 32000, "D": 2048},
    {"N": 8192, "V": 128256, "D": 768},
    {"N": 5003, "V": 50257, "D": 1001},
]
SWEEP_CPU = [{"N": 90, "V": 17, "D": 33}, {"N": 6, "V": 40, "D": 140}]


def make_args(dims, device="cuda", dtype=torch.float32):
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    return w, torch.randint(0, dims["V"], (dims["N"],), device=device)


# ---- backward ----


@triton.jit
def segment_sum_kernel(dy_ptr, order_ptr, begin_ptr, dw_ptr, D, BLOCK: tl.constexpr):
    v = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for position in range(tl.load(begin_ptr + v), tl.load(begin_ptr + v + 1)):
        token = tl.load(order_ptr + position)
        acc += tl.load(dy_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(dw_ptr + v * D + cols, acc, mask=cols < D)


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
        V, D = ctx.w_shape
        order = torch.argsort(idx.view(-1), stable=True)
        begin = torch.searchsorted(idx.view(-1)[order], torch.arange(V + 1, device=idx.device))
        dw = torch.empty((V, D), device=dy.device, dtype=ctx.w_dtype)
        segment_sum_kernel[(V, triton.cdiv(D, 128))](dy, order, begin, dw, D, BLOCK=128)
        return dw, None


def embedding_autograd(w, idx):
    return Embedding.apply(w, idx)

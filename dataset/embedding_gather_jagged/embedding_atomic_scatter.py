"""Embedding lookup.

Forward    y_i = W[idx_i]
Backward   dW_v = sum of dy_i over the i with idx_i = v

Forward schedule: a program owns (token, column tile) and copies.
Backward schedule: the same ownership, reversed: each program adds its dy tile into row idx_i of a zeroed
fp32 buffer by atomics. No sort and no index structure, work proportional to the tokens only: the best
choice when tokens are few or ids rarely repeat. Hot ids serialise on their row; the sorted rows of this
family avoid that.

op: embedding
schedule: atomic_accumulate
difficulty: 1
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
SWEEP_CPU = [{"N": 70, "V": 23, "D": 40}, {"N": 9, "V": 5, "D": 150}]


def make_args(dims, device="cuda", dtype=torch.float32):
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    return w, torch.randint(0, dims["V"], (dims["N"],), device=device)


# ---- backward ----


@triton.jit
def embedding_backward_kernel(dy_ptr, idx_ptr, dw_ptr, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(idx_ptr + token)
    mask = cols < D
    dy = tl.load(dy_ptr + token * D + cols, mask=mask, other=0.0).to(tl.float32)
    tl.atomic_add(dw_ptr + v * D + cols, dy, mask=mask)


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
        D = ctx.w_shape[1]
        dw = torch.zeros(ctx.w_shape, device=dy.device, dtype=torch.float32)
        grid = (idx.numel(), triton.cdiv(D, 128))
        embedding_backward_kernel[grid](dy, idx, dw, D, BLOCK=128)
        return dw.to(ctx.w_dtype), None


def embedding_autograd(w, idx):
    return Embedding.apply(w, idx)

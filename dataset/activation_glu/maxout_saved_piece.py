"""Maxout: each output is the largest of K pieces, and the gradient goes to the piece that won.

Forward    y_mc = max over j < K of x_mcj;   w_mc the first j that has it
Backward   dx_mcj = dy_mc where j = w_mc, 0 elsewhere

Forward schedule: a program owns a tile of outputs and runs through their K pieces with the best so far and
its number in registers. The numbers are saved, a byte an output.
Backward schedule: the same owner writes all K pieces of its outputs, each a comparison of j with the byte: a
full store, so that dx is not zeroed first, no scatter, and x itself need not be kept: one byte an output in
place of K numbers. Comparing x with y again would, at a tie, pay two pieces.

op: maxout
schedule: index_or_seed_replay
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 256


@triton.jit
def maxout_kernel(x_ptr, y_ptr, winner_ptr, size, K, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    best = tl.load(x_ptr + i * K, mask=i < size, other=0.0).to(tl.float32)
    winner = tl.zeros([BLOCK], dtype=tl.int32)
    for j in range(1, K):
        x = tl.load(x_ptr + i * K + j, mask=i < size, other=0.0).to(tl.float32)
        winner = tl.where(x > best, j, winner)
        best = tl.where(x > best, x, best)
    tl.store(y_ptr + i, best.to(y_ptr.dtype.element_ty), mask=i < size)
    tl.store(winner_ptr + i, winner.to(tl.int8), mask=i < size)


def maxout_forward(x):
    K = x.shape[-1]
    if not 1 <= K <= 127:
        raise ValueError(f"the number of one of {K} pieces does not fit a byte")
    y = torch.empty(x.shape[:-1], device=x.device, dtype=x.dtype)
    winner = torch.empty(y.shape, device=x.device, dtype=torch.int8)
    maxout_kernel[(triton.cdiv(y.numel(), BLOCK),)](x, y, winner, y.numel(), K, BLOCK=BLOCK)
    return y, winner


@autodiff(inputs_require_grad=(0,))
def maxout(x):
    """x: (..., K), the pieces last; gives (...)."""
    return maxout_forward(x.contiguous())[0]


def reference(x):
    return x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)


SWEEP = [{"M": 8192, "C": 4096, "K": 4}, {"M": 4099, "C": 1000, "K": 3}]
SWEEP_CPU = [{"M": 30, "C": 14, "K": 3}, {"M": 5, "C": 260, "K": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["C"], dims["K"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def maxout_backward_kernel(winner_ptr, dy_ptr, dx_ptr, size, K, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    winner = tl.load(winner_ptr + i, mask=i < size, other=0).to(tl.int32)
    dy = tl.load(dy_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    for j in range(K):
        dx = tl.where(winner == j, dy, 0.0)
        tl.store(dx_ptr + i * K + j, dx.to(dx_ptr.dtype.element_ty), mask=i < size)


class Maxout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, winner = maxout_forward(x.contiguous())
        ctx.save_for_backward(winner)
        ctx.K = x.shape[-1]
        return y

    @staticmethod
    def backward(ctx, dy):
        (winner,) = ctx.saved_tensors
        dx = torch.empty((*winner.shape, ctx.K), device=dy.device, dtype=dy.dtype)
        maxout_backward_kernel[(triton.cdiv(winner.numel(), BLOCK),)](
            winner, dy.contiguous(), dx, winner.numel(), ctx.K, BLOCK=BLOCK
        )
        return dx


def maxout_autograd(x):
    return Maxout.apply(x)

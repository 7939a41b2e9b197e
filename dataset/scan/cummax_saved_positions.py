"""Running maximum along time, with the positions that hold it.

Forward    p_t the last s <= t at which x_s is the largest so far,  y_t = x_{p_t}
Backward   dx_s = sum of dy_t over all t with p_t = s

Forward schedule: a program owns (batch, channel tile) and walks time with the maximum and its position in
registers; the positions are an output too, as in torch.cummax.
Backward schedule: the steps that share a position are neighbours: p_t = s for s <= t < the next position. So
what looks like a scatter with atomics is a walk by the same owner from the end: it adds up dy, and where p_t
= t it stores the sum and starts anew, elsewhere it stores 0. Every dx is written once, in order. Values are
not kept: which of several equal ones was taken, only the position tells.

op: cummax
schedule: reverse_scan, index_or_seed_replay
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def cummax_kernel(x_ptr, y_ptr, p_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    y = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    p = tl.zeros([BLOCK], dtype=tl.int64)
    for t in range(T):
        offs = (b * T + t) * C + cols
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        taken = x >= y
        y = tl.where(taken, x, y)
        p = tl.where(taken, t, p)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(p_ptr + offs, p, mask=mask)


@autodiff(inputs_require_grad=(0,))
def cummax(x):
    """x: (B, T, C); gives the maxima so far along T and their positions, int64."""
    x = x.contiguous()
    B, T, C = x.shape
    y, p = torch.empty_like(x), torch.empty(x.shape, device=x.device, dtype=torch.int64)
    cummax_kernel[(triton.cdiv(C, 128), B)](x, y, p, T, C, BLOCK=128)
    return y, p


def reference(x):
    return tuple(torch.cummax(x, dim=1))


SWEEP = [{"B": 32, "T": 512, "C": 2048}, {"B": 3, "T": 2039, "C": 500}]
SWEEP_CPU = [{"B": 2, "T": 31, "C": 20}, {"B": 1, "T": 5, "C": 130}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["T"], dims["C"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def cummax_backward_kernel(p_ptr, dy_ptr, dx_ptr, T, C, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for back in range(T):
        t = T - 1 - back
        offs = (b * T + t) * C + cols
        taken = tl.load(p_ptr + offs, mask=mask, other=0) == t
        total += tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offs, tl.where(taken, total, 0.0).to(dx_ptr.dtype.element_ty), mask=mask)
        total = tl.where(taken, 0.0, total)


class Cummax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y, p = cummax(x)
        ctx.save_for_backward(p)
        ctx.mark_non_differentiable(p)
        return y, p

    @staticmethod
    def backward(ctx, dy, _):
        (p,) = ctx.saved_tensors
        dy = dy.contiguous()
        B, T, C = p.shape
        dx = torch.empty_like(dy)
        cummax_backward_kernel[(triton.cdiv(C, 128), B)](p, dy, dx, T, C, BLOCK=128)
        return dx


def cummax_autograd(x):
    return Cummax.apply(x)

"""Loops over tiles of the vocabulary; the log-sum-exp is saved by the forward."""

import torch
import triton
import triton.language as tl


@triton.jit
def lse_kernel(x_ptr, lse_ptr, V, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(x_ptr + row * V + start + cols, mask=start + cols < V, other=-float("inf"))
        higher = tl.maximum(most, x)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(most - shift) + tl.exp(x - shift)
        most = higher
    peak = tl.max(most, axis=0)
    tl.store(lse_ptr + row, peak + tl.log(tl.sum(total * tl.exp(most - peak), axis=0)))


@triton.jit
def cross_entropy_backward_kernel(x_ptr, t_ptr, lse_ptr, dloss_ptr, dx_ptr, V, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(t_ptr + row)
    dloss = tl.where(target < 0, 0.0, tl.load(dloss_ptr + row))
    x = tl.load(x_ptr + row * V + cols, mask=cols < V, other=-float("inf"))
    p = tl.exp(x - tl.load(lse_ptr + row))
    tl.store(dx_ptr + row * V + cols, dloss * (p - (cols == target)), mask=cols < V)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        logits = logits.contiguous()
        M, V = logits.shape
        lse = torch.empty(M, device=logits.device, dtype=torch.float32)
        lse_kernel[(M,)](logits, lse, V, BLOCK=16)
        ctx.save_for_backward(logits, target, lse)
        return cross_entropy(logits, target)

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse = ctx.saved_tensors
        M, V = logits.shape
        dx = torch.empty_like(logits)
        grid = (M, triton.cdiv(V, 16))
        cross_entropy_backward_kernel[grid](logits, target, lse, dloss.contiguous(), dx, V, BLOCK=16)
        return dx, None


def cross_entropy_autograd(logits, target):
    return CrossEntropy.apply(logits, target)

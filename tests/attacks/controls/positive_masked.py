"""A harmless argument where x is not positive, then zero."""

import torch
import triton
import triton.language as tl


@triton.jit
def positive_backward_kernel(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=1.0)
    w = tl.load(w_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)
    safe = tl.where(x > 0, x, 1.0)
    by_root = w * dy * 0.5 / tl.sqrt(safe)
    by_log = dy * (tl.log(safe) + 1)
    tl.store(dx_ptr + i, tl.where(x > 0, by_root + by_log, 0.0), mask=i < N)
    tl.store(dw_ptr + i, tl.where(x > 0, dy * tl.sqrt(safe), 0.0), mask=i < N)


class Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return positive(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = (t.contiguous() for t in ctx.saved_tensors)
        dx, dw, n = torch.empty_like(x), torch.empty_like(w), x.numel()
        positive_backward_kernel[(triton.cdiv(n, 16),)](x, w, dy.contiguous(), dx, dw, n, BLOCK=16)
        return dx, dw


def positive_autograd(x, w):
    return Positive.apply(x, w)

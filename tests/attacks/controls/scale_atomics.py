"""ds by atomics onto zeros; everything in one kernel."""

import torch
import triton
import triton.language as tl


@triton.jit
def scale_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)
    tl.atomic_add(ds_ptr, tl.sum(dy * x))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return scale(x, s)

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        x, dy, n = x.contiguous(), dy.contiguous(), x.numel()
        dx, ds = torch.empty_like(x), torch.zeros_like(s)
        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)
        return dx, ds


def scale_autograd(x, s):
    return Scale.apply(x, s)

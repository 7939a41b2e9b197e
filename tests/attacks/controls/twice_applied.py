"""One Function, applied for each output: autograd itself adds up what comes back for x."""

import torch
import triton
import triton.language as tl


@triton.jit
def product_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)
    tl.atomic_add(ds_ptr, tl.sum(dy * x))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return product(x, s)

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        dy, n = dy.contiguous(), x.numel()
        dx, ds = torch.empty_like(x), torch.zeros_like(s)
        product_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, n, BLOCK=16)
        return dx, ds


def twice_autograd(x, s, t):
    x = x.contiguous()
    return Product.apply(x, s), Product.apply(x, t)

"""The product of the tables is the stub's own; a kernel multiplies by it."""

import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < N, other=0.0)
    tl.store(out_ptr + i, a * tl.load(b_ptr + i, mask=i < N, other=0.0), mask=i < N)


def product(a, b):
    out = torch.empty_like(a)
    product_kernel[(triton.cdiv(a.numel(), 16),)](a, b, out, a.numel(), BLOCK=16)
    return out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(z)
        return product(x, z)

    @staticmethod
    def backward(ctx, dy):
        (z,) = ctx.saved_tensors
        return product(dy.contiguous(), z), None


def masked_scale_autograd(x, keep, gain):
    x, keep, gain = x.contiguous(), keep.contiguous(), gain.contiguous()
    return Scaled.apply(x, keep * gain)

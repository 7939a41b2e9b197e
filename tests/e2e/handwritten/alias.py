"""Fused SiLU, as in a tutorial: the alias of apply is what people call."""

import os

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def silu_fwd(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * tl.sigmoid(x), mask=i < n)


@triton.jit
def silu_bwd(x_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < n, other=0.0)
    s = tl.sigmoid(x)
    tl.store(dx_ptr + i, dy * s * (1 + x * (1 - s)), mask=i < n)


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        y = torch.empty_like(x)
        silu_fwd[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        silu_bwd[(triton.cdiv(x.numel(), 64),)](x, dy, dx, x.numel(), BLOCK=64)
        return dx


silu = SiLU.apply

SWEEP = [{"M": 6, "N": 20}]


def make_args(dims, device=DEVICE, dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


if __name__ == "__main__":
    print(os.getcwd(), silu(torch.randn(4, device=DEVICE)))

"""An autotuned kernel with a helper; one program adds up ds in a loop."""

import torch
import triton
import triton.language as tl


@triton.jit
def products(x_ptr, dy_ptr, i, N):
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    return x * tl.load(dy_ptr + i, mask=i < N, other=0.0)


@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=1) for b in (32, 16)], key=["N"])
@triton.jit
def scale_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, N, BLOCK: tl.constexpr):
    s = tl.load(s_ptr)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += products(x_ptr, dy_ptr, i, N)
        tl.store(dx_ptr + i, tl.load(dy_ptr + i, mask=i < N, other=0.0) * s, mask=i < N)
    tl.store(ds_ptr, tl.sum(total))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x.contiguous(), s)
        return scale(x, s)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        dx, ds = torch.empty_like(x), torch.empty_like(s)
        scale_backward_kernel[(1,)](x, s, dy.contiguous(), dx, ds, x.numel())
        return dx, ds


def scale_autograd(x, s):
    return Scale.apply(x, s)

"""ds by atomics, cleared by the hook of the configuration before each run, and by the autotuner."""

import torch
import triton
import triton.language as tl


def clear(given):
    given["ds_ptr"].zero_()


@triton.autotune(
    configs=[triton.Config({"BLOCK": b}, num_warps=1, pre_hook=clear) for b in (16, 32)],
    key=["N"],
    reset_to_zero=["ds_ptr"],
)
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
        dx, ds = torch.empty_like(x), torch.empty_like(s)
        scale_backward_kernel[lambda given: (triton.cdiv(n, given["BLOCK"]),)](x, s, dy, dx, ds, n)
        return dx, ds


def scale_autograd(x, s):
    return Scale.apply(x, s)

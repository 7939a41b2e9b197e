"""ds by load, add and store behind a lock; the first program to come stores without a load, so that nothing
is cleared."""

import torch
import triton
import triton.language as tl


@triton.jit
def scale_backward_kernel(x_ptr, s_ptr, dy_ptr, dx_ptr, ds_ptr, lock_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dy = tl.load(dy_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, dy * tl.load(s_ptr), mask=i < N)
    ds = tl.sum(dy * x)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    if tl.load(lock_ptr + 1) == 0:
        tl.atomic_xchg(lock_ptr + 1, 1)
    else:
        ds += tl.load(ds_ptr)
    tl.store(ds_ptr, ds)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return scale(x, s)

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        x, dy, n = x.contiguous(), dy.contiguous(), x.numel()
        dx, ds, lock = torch.empty_like(x), torch.zeros_like(s), x.new_zeros(2, dtype=torch.int32)
        scale_backward_kernel[(triton.cdiv(n, 16),)](x, s, dy, dx, ds, lock, n, BLOCK=16)
        return dx, ds


def scale_autograd(x, s):
    return Scale.apply(x, s)

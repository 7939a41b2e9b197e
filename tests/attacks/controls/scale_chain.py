"""ds handed from each program to the next, which waits for a flag; programs begin in order."""

import torch
import triton
import triton.language as tl


@triton.jit
def dx_kernel(s_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dx_ptr + i, tl.load(dy_ptr + i, mask=i < N, other=0.0) * tl.load(s_ptr), mask=i < N)


@triton.jit
def ds_kernel(x_ptr, dy_ptr, sums_ptr, flags_ptr, N, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    i = p * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    total = tl.sum(x * tl.load(dy_ptr + i, mask=i < N, other=0.0))
    if p > 0:
        while tl.atomic_add(flags_ptr + p - 1, 0) == 0:
            pass
        total += tl.load(sums_ptr + p - 1)
    tl.store(sums_ptr + p, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr + p, 1)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return scale(x, s)

    @staticmethod
    def backward(ctx, dy):
        x, s = ctx.saved_tensors
        x, dy, n = x.contiguous(), dy.contiguous(), x.numel()
        blocks = triton.cdiv(n, 16)
        dx, sums = torch.empty_like(x), torch.empty(blocks, device=x.device, dtype=torch.float32)
        flags = torch.zeros(blocks, device=x.device, dtype=torch.int32)
        dx_kernel[(blocks,)](s, dy, dx, n, BLOCK=16)
        ds_kernel[(blocks,)](x, dy, sums, flags, n, BLOCK=16)
        return dx, sums[-1:].to(s.dtype)


def scale_autograd(x, s):
    return Scale.apply(x, s)

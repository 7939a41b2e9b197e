"""An upstream that is None costs nothing: a flag for each output."""

import torch
import triton
import triton.language as tl


@triton.jit
def three_backward_kernel(
    x_ptr,
    da_ptr,
    db_ptr,
    dc_ptr,
    dx_ptr,
    N,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    HAS_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_A:
        dx += 2 * x * tl.load(da_ptr + i, mask=i < N, other=0.0)
    if HAS_B:
        dx += 3 * x * x * tl.load(db_ptr + i, mask=i < N, other=0.0)
    if HAS_C:
        dx += 4 * x * x * x * tl.load(dc_ptr + i, mask=i < N, other=0.0)
    tl.store(dx_ptr + i, dx, mask=i < N)


class Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return three(x)

    @staticmethod
    def backward(ctx, da, db, dc):
        x = ctx.saved_tensors[0].contiguous()
        given = [x if d is None else d.contiguous() for d in (da, db, dc)]
        has = {"HAS_A": da is not None, "HAS_B": db is not None, "HAS_C": dc is not None}
        dx, n = torch.empty_like(x), x.numel()
        three_backward_kernel[(triton.cdiv(n, 16),)](x, *given, dx, n, **has, BLOCK=16)
        return dx


def three_autograd(x):
    return Three.apply(x)

"""A gated unit with a squared ReLU, for sparse hidden layers.

Forward    r = max(a, 0),   y = r^2 b
Backward   da = 2 r b dy,   db = r^2 dy

Forward schedule: flat tiles; only the inputs are kept.
Backward schedule: the same tiles, one read of a, b and dy and one write of da and db. With a plain ReLU the
gradient of a needs a mask of its own; here the slope 2 r is r again, which is 0 wherever the gate is shut and
continuous where it opens, so that nothing is compared: r is all that the tile makes, for both gradients. Nor
is anything saved in the forward, r costing one instruction.

op: reglu_squared
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 1024


@triton.jit
def reglu_squared_kernel(a_ptr, b_ptr, y_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    r = tl.maximum(a, 0.0)
    tl.store(y_ptr + i, (r * r * b).to(y_ptr.dtype.element_ty), mask=i < size)


@autodiff(inputs_require_grad=(0, 1))
def reglu_squared(a, b):
    """a, b: one shape, gates and values."""
    if a.shape != b.shape:
        raise ValueError("a and b must have one shape")
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    reglu_squared_kernel[(triton.cdiv(a.numel(), BLOCK),)](a, b, y, a.numel(), BLOCK=BLOCK)
    return y


def reference(a, b):
    return torch.relu(a).square() * b


SWEEP = [{"M": 8192, "N": 11008}, {"M": 4099, "N": 6144}]
SWEEP_CPU = [{"M": 31, "N": 56}, {"M": 150, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))


# ---- backward ----


@triton.jit
def reglu_squared_backward_kernel(a_ptr, b_ptr, dy_ptr, da_ptr, db_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=i < size, other=0.0).to(tl.float32)
    r = tl.maximum(a, 0.0)
    tl.store(da_ptr + i, (2 * r * b * dy).to(da_ptr.dtype.element_ty), mask=i < size)
    tl.store(db_ptr + i, (r * r * dy).to(db_ptr.dtype.element_ty), mask=i < size)


class RegluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        a, b = a.contiguous(), b.contiguous()
        ctx.save_for_backward(a, b)
        return reglu_squared(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        reglu_squared_backward_kernel[(triton.cdiv(a.numel(), BLOCK),)](
            a, b, dy.contiguous(), da, db, a.numel(), BLOCK=BLOCK
        )
        return da if ctx.needs_input_grad[0] else None, db if ctx.needs_input_grad[1] else None


def reglu_squared_autograd(a, b):
    return RegluSquared.apply(a, b)

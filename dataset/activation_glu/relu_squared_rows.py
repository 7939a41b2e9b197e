"""Squared ReLU, whose backward needs its output alone.

Forward    y = max(x, 0)^2
Backward   dy/dx = 2 max(x, 0) = 2 sqrt(y):  dx = 2 sqrt(y) dy

Forward schedule: flat tiles.
Backward schedule: flat tiles. The function is not one-to-one, but its slope is a function of its value, so x
need not be kept: y is what the next product saves for its own gradient in any case, and a feed-forward layer
holds one hidden tensor until the backward instead of two. A root costs nothing beside a load, and it halves
the relative error that rounding y to bf16 has left. In fp16, whose range squares soon leave at both ends, the
root would find 0 or infinity: there x has to be kept.

op: relu2
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def relu2_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    y = tl.where(x > 0, x * x, 0.0)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0,))
def relu2(x):
    """x: any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    relu2_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def reference(x):
    return torch.where(x > 0, x * x, 0.0)


SWEEP = [{"M": 8192, "N": 16384}, {"M": 4099, "N": 5461}]
SWEEP_CPU = [{"M": 5, "N": 450}, {"M": 3, "N": 77}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def relu2_backward_kernel(y_ptr, dy_ptr, dx_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    dx = 2 * tl.sqrt(y) * dy
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=offs < n_elements)


class ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = relu2(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        relu2_backward_kernel[(triton.cdiv(y.numel(), 1024),)](y, dy.contiguous(), dx, y.numel(), BLOCK=1024)
        return dx


def relu2_autograd(x):
    return ReLU2.apply(x)

"""Mish from one exponential, in the forward and in the backward.

Forward    y = x h,  h = tanh(log(1 + e^x)).  tanh(log w) = (w^2 - 1) / (w^2 + 1), and with w = 1 + e^x:
           h = a / (a + 2 b), where for x <= 0, with e = e^x:   a = e (e + 2),  b = 1,
           and for x > 0 all is divided by e^2x, with f = e^-x:  a = 1 + 2 f,   b = f^2
Backward   dlog(1 + e^x)/dx = s(x), the sigmoid; tanh' = 1 - h^2 = (1 - h)(1 + h), 1 - h = 2 b / (a + 2 b):
           dx = dy (h + x s(x) (1 - h)(1 + h))

Forward schedule: flat tiles.
Backward schedule: flat tiles; x is all that is kept, and the value and its slope come from e^-|x|, which is
at most 1: nothing overflows, where (1 + e^x)^2 would from x = 44 on. No logarithm and no tanh is computed in
either pass. 1 - h is a quotient of its own, since near h = 1 the difference has no digits, and s(x) is 1 / (1
+ e^-|x|) or e^-|x| times that.

op: mish
schedule: same_tile_pointwise
difficulty: 2
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def parts(x):
    """e^-|x|, and a and b of h = a / (a + 2 b)."""
    e = tl.exp(tl.where(x > 0, -x, x))
    return e, tl.where(x > 0, 1 + 2 * e, e * (e + 2)), tl.where(x > 0, e * e, 1.0)


@triton.jit
def mish_kernel(x_ptr, y_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    _, a, b = parts(x)
    tl.store(y_ptr + offs, (x * a / (a + 2 * b)).to(y_ptr.dtype.element_ty), mask=offs < n_elements)


@autodiff(inputs_require_grad=(0,))
def mish(x):
    """x: any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    mish_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


def reference(x):
    return torch.nn.functional.mish(x)


SWEEP = [{"N": 64, "C": 256, "HW": 76 * 76}, {"N": 33, "C": 63, "HW": 1521}]
SWEEP_CPU = [{"N": 3, "C": 5, "HW": 53}, {"N": 1, "C": 2, "HW": 700}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (3 * torch.randn(dims["N"], dims["C"], dims["HW"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def mish_backward_kernel(x_ptr, dy_ptr, dx_ptr, n_elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=offs < n_elements, other=0.0).to(tl.float32)
    e, a, b = parts(x)
    h = a / (a + 2 * b)
    rest = 2 * b / (a + 2 * b)
    s = tl.where(x > 0, 1.0, e) / (1 + e)
    dx = dy * (h + x * s * rest * (1 + h))
    tl.store(dx_ptr + offs, dx.to(dx_ptr.dtype.element_ty), mask=offs < n_elements)


class Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return mish(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        mish_backward_kernel[(triton.cdiv(x.numel(), 1024),)](x, dy.contiguous(), dx, x.numel(), BLOCK=1024)
        return dx


def mish_autograd(x):
    return Mish.apply(x)

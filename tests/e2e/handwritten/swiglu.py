"""SwiGLU with an option to take the upstream's memory for a gradient, which is off unless the caller's own
code turns it on."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

try:
    from torch.amp import custom_bwd, custom_fwd
except ImportError:
    from torch.cuda.amp import custom_bwd, custom_fwd

amp_custom_fwd = functools.partial(custom_fwd, device_type="cuda")
amp_custom_bwd = functools.partial(custom_bwd, device_type="cuda")


class Options(NamedTuple):
    inplace: bool = False
    block: int = 64


OPTIONS = Options()


@triton.jit
def swiglu_fwd(a_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, a * tl.sigmoid(a) * tl.load(b_ptr + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def swiglu_bwd(dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + i, mask=i < n, other=0.0)
    a = tl.load(a_ptr + i, mask=i < n, other=0.0)
    b = tl.load(b_ptr + i, mask=i < n, other=0.0)
    s = tl.sigmoid(a)
    tl.store(db_ptr + i, dy * a * s, mask=i < n)
    tl.store(da_ptr + i, dy * b * s * (1 + a * (1 - s)), mask=i < n)


class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    @amp_custom_fwd()
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, options: Options = OPTIONS) -> torch.Tensor:
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty_like(a)
        n = a.numel()
        swiglu_fwd[(triton.cdiv(n, options.block),)](a, b, y, n, BLOCK=options.block)
        ctx.save_for_backward(a, b)
        ctx.options = options
        return y

    @staticmethod
    @amp_custom_bwd()
    def backward(ctx: Any, dy: torch.Tensor):
        a, b = ctx.saved_tensors
        dy = dy.contiguous()
        options = getattr(ctx, "options", OPTIONS)
        n = a.numel()
        da = dy if options.inplace else torch.empty_like(a)
        db = torch.empty_like(b)
        swiglu_bwd[(triton.cdiv(n, options.block),)](dy, a, b, da, db, n, BLOCK=options.block)
        return da, db, None


class SwiGLU(torch.nn.Module):
    def forward(self, a, b):
        return SwiGLUFunction.apply(a, b)


def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return SwiGLUFunction.apply(a, b)


SWEEP = [{"M": 6, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a, b = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return a, b

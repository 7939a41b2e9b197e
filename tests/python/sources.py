"""A forward file, its backward, and the pair of both, for tests of the operations."""

from __future__ import annotations

from pathlib import Path

SANDBOX = Path(__file__).resolve().parents[2] / "sandbox"

SCALE = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 8}, {"N": 100, "required": False}]


@triton.jit
def scale_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x * factor, mask=mask)


@autodiff(inputs_require_grad=(0,))
def scale(x, factor=2.0):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 16),)](x, y, factor, x.numel(), BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""

SCALE_BACKWARD = """

# ---- backward ----


@triton.jit
def scale_bwd_kernel(d_y_ptr, d_x_ptr, factor, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    d_y = tl.load(d_y_ptr + offsets, mask=mask)
    tl.store(d_x_ptr + offsets, d_y * factor, mask=mask)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return scale(x, factor)

    @staticmethod
    def backward(ctx, d_y):
        d_y = d_y.contiguous()
        d_x = torch.empty_like(d_y)
        scale_bwd_kernel[(triton.cdiv(d_y.numel(), 16),)](d_y, d_x, ctx.factor, d_y.numel(), BLOCK=16)
        return d_x, None


def scale_autograd(x, factor=2.0):
    return Scale.apply(x, factor)
"""

IMPORT = "from kernel_agent import autodiff\n"
INLINE = """
def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub

"""
SCALE_PAIR = SCALE.replace(IMPORT, INLINE) + SCALE_BACKWARD

"""Forward files and backwards for the end-to-end tests: small, so that a whole run takes seconds."""

from __future__ import annotations

FORWARD = '''"""y = x * w, row by row."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * N + cols, x * w, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def scale(x, w):
    x, w = x.contiguous(), w.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    scale_kernel[(M,)](x, w, y, N, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 4, "N": 24}, {"M": 3, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return (x, torch.randn(dims["N"], device=device, dtype=dtype))
'''

BACKWARD = """@triton.jit
def scale_dx_kernel(dy_ptr, w_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(dx_ptr + row * N + cols, dy * w, mask=mask)


@triton.jit
def scale_dw_kernel(dy_ptr, x_ptr, dw_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(0, M):
        dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
        dw += dy * x
    tl.store(dw_ptr + cols, dw, mask=mask)


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x, w = x.contiguous(), w.contiguous()
        ctx.save_for_backward(x, w)
        return scale(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy.contiguous()
        M, N = x.shape
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            scale_dx_kernel[(M,)](dy, w, dx, N, BLOCK=triton.next_power_of_2(N))
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(w)
            scale_dw_kernel[(triton.cdiv(N, 16),)](dy, x, dw, M, N, BLOCK=16)
        return dx, dw


def scale_autograd(x, w):
    return ScaleFunction.apply(x, w)
"""

# Forgets every row but the first in dw: right for M = 1 only.
WRONG = BACKWARD.replace("for row in range(0, M):", "for row in range(0, 1):")

PATCH = """*** Begin Patch
*** Update File: pair.py
@@ def scale_dw_kernel
     dw = tl.zeros([BLOCK], dtype=tl.float32)
-    for row in range(0, 1):
+    for row in range(0, M):
         dy = tl.load(dy_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
*** End Patch
"""

# For runs of which only matters that they go on to their end: a check of it takes half as long.
SMALL = '''"""y = x * x."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def square_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, x * x, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def square(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
'''

SMALL_BACKWARD = """@triton.jit
def square_dx_kernel(dy_ptr, x_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + cols, mask=cols < N, other=0.0)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    tl.store(dx_ptr + cols, 2.0 * x * dy, mask=cols < N)


class SquareFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        return square(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x)
        square_dx_kernel[(triton.cdiv(x.numel(), 32),)](dy, x, dx, x.numel(), BLOCK=32)
        return dx


def square_autograd(x):
    return SquareFunction.apply(x)
"""

# Raises in the first call, which is found before any case is run: the dearest part of a check.
RAISES = BACKWARD.replace("dy = dy.contiguous()", "dy = dy.contigous()")

MEND = """*** Begin Patch
*** Update File: pair.py
@@ def backward
         x, w = ctx.saved_tensors
-        dy = dy.contigous()
+        dy = dy.contiguous()
         M, N = x.shape
*** End Patch
"""

# The endpoint's last step, of a run that need not go on since all that matters has been asked: it ends with
# code 5.
ENOUGH = {"status": 401, "error": "enough"}


def fenced(code: str) -> str:
    return f"Here is the backward.\n\n```python\n{code}```\n"

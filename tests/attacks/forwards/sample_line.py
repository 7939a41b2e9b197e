"""Linear interpolation of rows at fractional positions, zero outside: x (batch, channel, length), at
(batch, points) in units of elements.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def sample_line_kernel(x_ptr, at_ptr, y_ptr, C, L, P, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = p < P
    at = tl.load(at_ptr + b * P + p, mask=mask, other=-9.0).to(tl.float32)
    low = tl.floor(at)
    part = at - low
    left = low.to(tl.int32)
    has_left = mask & (left >= 0) & (left < L)
    has_right = mask & (left + 1 >= 0) & (left + 1 < L)
    for c in range(C):
        row = x_ptr + (b * C + c) * L
        x0 = tl.load(row + left, mask=has_left, other=0.0).to(tl.float32)
        x1 = tl.load(row + left + 1, mask=has_right, other=0.0).to(tl.float32)
        tl.store(y_ptr + (b * C + c) * P + p, x0 * (1 - part) + x1 * part, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def sample_line(x, at):
    x, at = x.contiguous(), at.contiguous()
    B, C, L = x.shape
    P = at.shape[1]
    y = torch.empty((B, C, P), device=x.device, dtype=x.dtype)
    sample_line_kernel[(B, triton.cdiv(P, 32))](x, at, y, C, L, P, BLOCK=32)
    return y


SWEEP = [{"B": 2, "C": 3, "L": 40, "P": 50}, {"B": 3, "C": 2, "L": 21, "P": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["C"], dims["L"], device=device, dtype=dtype)
    at = torch.rand(dims["B"], dims["P"], device=device, dtype=dtype) * (dims["L"] + 3) - 2
    return x, at

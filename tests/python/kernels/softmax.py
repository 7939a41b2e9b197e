"""Row softmax, one block a row."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 7, "N": 100}, {"M": 1, "N": 1, "required": False}, {"M": 3, "N": 64}]


@triton.jit
def softmax_kernel(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * stride + cols, e / tl.sum(e, axis=0), mask=mask)


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    y = torch.empty_like(x)
    m, n = x.shape
    softmax_kernel[(m,)](x, y, x.stride(0), n, BLOCK=triton.next_power_of_2(n))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


def reference(x):
    return torch.softmax(x, 1)

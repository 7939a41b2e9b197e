"""y = x^3 alpha, alpha a number of either sign, over the rows of x."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def cubed_kernel(x_ptr, y_ptr, N, alpha, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols, x * x * x * alpha, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def cubed(x, alpha=0.5):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    cubed_kernel[(M,)](x, y, N, alpha, BLOCK=64)
    return y


SWEEP = [{"M": 70, "N": 200}, {"M": 33, "N": 1000}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["M"], dims["N"], device=device, dtype=dtype), 0.5

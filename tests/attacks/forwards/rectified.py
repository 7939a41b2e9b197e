"""y = x where that is positive, else 0: the upstream passes where the data lets it."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def rectified_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, tl.where(x > 0, x, 0.0), mask=i < N)


@autodiff(inputs_require_grad=(0,))
def rectified(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    rectified_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


SWEEP = [{"N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)

"""The mean of each column."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def column_mean_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(M):
        total += tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + cols, total / M, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def column_mean(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(N, device=x.device, dtype=x.dtype)
    column_mean_kernel[(triton.cdiv(N, 16),)](x, y, M, N, BLOCK=16)
    return y


SWEEP = [{"M": 7, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)

"""The greatest element of each row, in tiles."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def row_max_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    most = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf")))
    tl.store(y_ptr + row, tl.max(most, axis=0))


@autodiff(inputs_require_grad=(0,))
def row_max(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    row_max_kernel[(M,)](x, y, N, BLOCK=8)
    return y


SWEEP = [{"M": 5, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)

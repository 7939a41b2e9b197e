"""Several outputs, some of them no tensors: square, None, the size, the input itself, cube, an index."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def powers_kernel(x_ptr, square_ptr, cube_ptr, sign_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(square_ptr + i, x * x, mask=i < N)
    tl.store(cube_ptr + i, x * x * x, mask=i < N)
    tl.store(sign_ptr + i, (x > 0).to(tl.int32), mask=i < N)


@autodiff(inputs_require_grad=(0,))
def several(x, flag=True):
    square, cube = torch.empty_like(x), torch.empty_like(x)
    sign = torch.empty(x.shape, device=x.device, dtype=torch.int32)
    powers_kernel[(triton.cdiv(x.numel(), 16),)](x, square, cube, sign, x.numel(), BLOCK=16)
    return square, None, x.numel(), (x, cube), sign


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),), {"flag": False}

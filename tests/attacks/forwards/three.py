"""Three outputs of one input: x^2, x^3 and x^4."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def three_kernel(x_ptr, a_ptr, b_ptr, c_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(a_ptr + i, x * x, mask=i < N)
    tl.store(b_ptr + i, x * x * x, mask=i < N)
    tl.store(c_ptr + i, x * x * x * x, mask=i < N)


@autodiff(inputs_require_grad=(0,))
def three(x):
    x = x.contiguous()
    a, b, c = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    three_kernel[(triton.cdiv(x.numel(), 16),)](x, a, b, c, x.numel(), BLOCK=16)
    return a, b, c


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)

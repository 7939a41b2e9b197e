"""y = 3 x + r: a kernel triples, torch adds."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def triple_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 3 * tl.load(x_ptr + i, mask=i < N, other=0.0), mask=i < N)


def triple(x):
    y = torch.empty_like(x)
    triple_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


@autodiff(inputs_require_grad=(0, 1))
def tripled_residual(x, r):
    x = x.contiguous()
    return r + triple(x)


SWEEP = [{"M": 4, "N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = dims["M"], dims["N"]
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))

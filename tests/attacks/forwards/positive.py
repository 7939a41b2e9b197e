"""y = w sqrt(x) + x log(x) where x is positive, and 0 elsewhere: two functions that have no value there."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def positive_kernel(x_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    w = tl.load(w_ptr + i, mask=i < N, other=0.0)
    root, log = tl.where(x > 0, tl.sqrt(x), 0.0), tl.where(x > 0, x * tl.log(x), 0.0)
    tl.store(y_ptr + i, w * root + log, mask=i < N)


@autodiff(inputs_require_grad=(0, 1))
def positive(x, w):
    x, w = x.contiguous(), w.contiguous()
    y = torch.empty_like(x)
    positive_kernel[(triton.cdiv(x.numel(), 16),)](x, w, y, x.numel(), BLOCK=16)
    return y


SWEEP = [{"N": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))

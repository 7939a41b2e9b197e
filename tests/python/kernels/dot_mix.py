"""o = a*b + dot(c, c) with a = exp(x), b = log(y)[:, None], c = a + b; one 16x16 block."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 16}]


@triton.jit
def mix_kernel(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)
    at = rows[:, None] * N + rows[None, :]
    a = tl.exp(tl.load(x_ptr + at).to(tl.float32))
    b = tl.log(tl.expand_dims(tl.load(y_ptr + rows).to(tl.float32), 1))
    c = a + b
    tl.store(o_ptr + at, a * b + tl.dot(c, c, input_precision="ieee"))


@autodiff(inputs_require_grad=(0, 1))
def mix(x, y):
    o = torch.empty_like(x)
    mix_kernel[(1,)](x, y, o, N=x.shape[0])
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    n = dims["N"]
    return torch.randn(n, n, device=device, dtype=dtype) * 0.3, torch.rand(
        n, device=device, dtype=dtype
    ) + 0.5


def reference(x, y):
    a, b = torch.exp(x), torch.log(y)[:, None]
    c = a + b
    return a * b + c @ c

"""y = gelu(x) * gain, gain one number a column, over the rows of x (rows, columns)."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gelu_gain_kernel(x_ptr, gain_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)) * gain
    tl.store(y_ptr + row * N + cols, y, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def gelu_gain(x, gain):
    x, gain = x.contiguous(), gain.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    gelu_gain_kernel[(M, triton.cdiv(N, 64))](x, gain, y, M, N, BLOCK=64)
    return y


SWEEP = [{"M": 8192, "N": 1000}, {"M": 70, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["N"], device=device, dtype=dtype)

"""y = x (keep * gain), keep and gain tables that want no gradient, multiplied by torch."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def masked_scale_kernel(x_ptr, z_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x * tl.load(z_ptr + i, mask=i < N, other=0.0), mask=i < N)


@autodiff(inputs_require_grad=(0,))
def masked_scale(x, keep, gain):
    x, keep, gain = x.contiguous(), keep.contiguous(), gain.contiguous()
    z = keep * gain
    y = torch.empty_like(x)
    masked_scale_kernel[(triton.cdiv(x.numel(), 16),)](x, z, y, x.numel(), BLOCK=16)
    return y


SWEEP = [{"M": 4, "N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = dims["M"], dims["N"]
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

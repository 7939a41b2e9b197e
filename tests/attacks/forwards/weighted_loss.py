"""A weighted mean of squared rows: a kernel squares and adds up, torch weighs in single precision and
scales."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def row_energy_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0).to(tl.float32)
        total += x * x
    tl.store(y_ptr + row, tl.sum(total, axis=0))


def row_energy(x):
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=torch.float32)
    row_energy_kernel[(M,)](x, y, N, BLOCK=16)
    return y


@autodiff(inputs_require_grad=(0, 1))
def weighted_loss(x, w, target, scale=3.0):
    x = x.contiguous()
    energy = row_energy(x) / x.shape[1]
    weights = torch.softmax(w.float(), 0)
    off = (energy - target).clamp(min=-2.0) * scale
    return (weights * off * off).sum() + energy.mean(), energy


SWEEP = [{"M": 12, "N": 40}]


def make_args(dims, device="cuda", dtype=torch.float16):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    w = torch.randn(dims["M"], device=device, dtype=dtype)
    return x, w, torch.rand(dims["M"], device=device, dtype=torch.float32)

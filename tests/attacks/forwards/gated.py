"""y = x sigmoid(g) row by row: the stub itself makes the gate, by torch."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gate_kernel(x_ptr, gate_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    gate = tl.load(gate_ptr + tl.program_id(0))
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=cols < N, other=0.0) * gate, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def gated(x, g):
    x = x.contiguous()
    gate = torch.sigmoid(g)
    y = torch.empty_like(x)
    gate_kernel[(x.shape[0],)](x, gate, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


SWEEP = [{"M": 3, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randn(dims["M"], device=device, dtype=dtype)

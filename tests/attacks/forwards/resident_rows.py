"""The length of each row. As many programs as the GPU has processors share the rows, each taking every so
many."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def resident_rows_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), M, tl.num_programs(0)):
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row, tl.sqrt(tl.sum(x * x, axis=0)))


def resident_programs(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@autodiff(inputs_require_grad=(0,))
def resident_rows(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty(M, device=x.device, dtype=x.dtype)
    resident_rows_kernel[(resident_programs(x.device),)](x, y, M, N, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 50, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)

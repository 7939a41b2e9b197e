"""Ragged rows pooled by segment: the first greatest element, and the mean, of every column.

A segment may be empty, and rows after the last segment belong to none.
"""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def ragged_pool_kernel(x_ptr, ends_ptr, top_ptr, mean_ptr, D, BLOCK: tl.constexpr):
    seg = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    begin = tl.load(ends_ptr + seg)
    end = tl.load(ends_ptr + seg + 1)
    best = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(begin, end):
        x = tl.load(x_ptr + row * D + cols, mask=mask, other=0.0).to(tl.float32)
        best = tl.where((row == begin) | (x > best), x, best)
        total += x
    tl.store(top_ptr + seg * D + cols, best, mask=mask)
    tl.store(mean_ptr + seg * D + cols, total / tl.maximum(end - begin, 1), mask=mask)


@autodiff(inputs_require_grad=(0,))
def ragged_pool(x, ends):
    """x: (rows, D); ends: int32 (segments + 1,), where each segment begins and the last one ends."""
    x = x.contiguous()
    S, D = ends.numel() - 1, x.shape[1]
    top = torch.empty((S, D), device=x.device, dtype=x.dtype)
    mean = torch.empty_like(top)
    ragged_pool_kernel[(S, triton.cdiv(D, 32))](x, ends, top, mean, D, BLOCK=32)
    return top, mean


SWEEP = [{"T": 60, "S": 7, "D": 40}, {"T": 33, "S": 4, "D": 17}]


def make_args(dims, device="cuda", dtype=torch.float32):
    T, S = dims["T"], dims["S"]
    x = torch.randn(T, dims["D"], device=device, dtype=dtype)
    used = T - T // 8
    cuts = torch.arange(S + 1, dtype=torch.float64) / S
    ends = (cuts * cuts * used).round().to(device=device, dtype=torch.int32)
    return x, ends

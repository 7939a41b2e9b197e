"""Types that a kernel is given as constexpr parameters, and casts of what begins as a number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 40}]


@triton.jit
def cubes(x, KIND: tl.constexpr):
    return (x * x).to(KIND) * x


@triton.jit
def total_kernel(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    total = total.to(KIND)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0).to(KIND)
        if KIND == tl.float64:
            x = x * 3.0
        total += tl.sum(cubes(x, KIND) + tl.zeros([BLOCK], KIND), axis=0)
    tl.store(y_ptr + row, tl.sin(total))


@autodiff(inputs_require_grad=(0,))
def totals(x, wide=False):
    y = torch.empty(x.shape[0], device=x.device, dtype=x.dtype)
    kind = tl.float64 if wide else tl.float32
    total_kernel[(x.shape[0],)](x, y, x.shape[1], KIND=kind, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.rand(dims["M"], dims["N"], device=device, dtype=dtype), dims.get("wide", False)
"""
DIMS = {"M": 3, "N": 40}


@pytest.mark.parametrize("first", [DIMS, DIMS | {"wide": True}])
def test_type_by_a_parameter__is_that_of_each_call(first: dict, write: Callable[[str], Path]) -> None:
    file = write(SOURCE)
    result = draft(file, first)
    assert_right(file, result, [(DIMS, "normal"), (DIMS | {"wide": True}, "normal")], 1e-4)

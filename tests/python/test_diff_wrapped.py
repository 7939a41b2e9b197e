"""Tiles whose last rows wrap around (`rows % M`): surplus lanes read rows that exist, and add nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 21, "N": 16}]


@triton.jit
def picked_kernel(x_ptr, index_ptr, y_ptr, m, n, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    wide = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = wide % m
    if LISTED:
        rows = tl.load(index_ptr + rows)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows[:, None] * n + cols[None, :], mask=cols[None, :] < n, other=0.0)
    tl.store(y_ptr + wide, tl.sum(x * x, axis=1), mask=wide < m)


@autodiff(inputs_require_grad=(0,))
def picked(x, index):
    m = x.shape[0]
    y = torch.empty(m, device=x.device, dtype=x.dtype)
    picked_kernel[(triton.cdiv(m, 16),)](x, index, y, m, x.shape[1], LISTED=index is not None, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.randperm(dims["M"], device=device) if dims.get("listed", True) else None
"""


@pytest.mark.parametrize("listed", [True, False])
def test_index_that_is_loaded_for_a_wrapped_row__is_read_inside_its_array(
    listed: bool, write: Callable[[str], Path]
) -> None:
    file = write(SOURCE)
    dims = {"M": 21, "N": 16, "listed": listed}
    result = draft(file, dims)
    assert listed or "atomics kept 0" in result["backward"] and "for tap" not in result["backward"]
    assert_right(file, result, [(dims, "normal"), ({"M": 5, "N": 9}, "normal")])

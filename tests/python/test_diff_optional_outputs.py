"""Outputs that a call may leave out: a launch passes None for them, in the traced call or in others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 20, "both": True}]


@triton.jit
def softmax_kernel(x_ptr, y_ptr, lse_ptr, n, BOTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=-float("inf"))
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - top), axis=0)
    tl.store(y_ptr + row * n + cols, tl.exp(x - top) / total, mask=cols < n)
    if CONDITION:
        tl.store(lse_ptr + row, top + tl.log(total))


@autodiff(inputs_require_grad=(0,))
def softmax(x, both=True):
    x = x.contiguous()
    m, n = x.shape
    y = torch.empty_like(x)
    lse = torch.empty(m, device=x.device, dtype=x.dtype) if both else None
    softmax_kernel[(m,)](x, y, lse, n, BOTH=both, BLOCK=triton.next_power_of_2(n))
    return y, lse


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["M"], dims["N"], device=device, dtype=dtype), dims["both"]
"""
WITH, WITHOUT = {"M": 3, "N": 20, "both": True}, {"M": 2, "N": 9, "both": False}


@pytest.mark.parametrize("condition", ["BOTH", "lse_ptr is not None"])
@pytest.mark.parametrize(("first", "other"), [(WITH, WITHOUT), (WITHOUT, WITH)])
def test_output_that_may_be_left_out__has_its_gradient_where_it_is_not(
    condition: str, first: dict[str, Any], other: dict[str, Any], write: Callable[[str], Path]
) -> None:
    file = write(SOURCE.replace("CONDITION", condition))
    result = draft(file, first)
    assert_right(file, result, [(first, "normal"), (other, "normal")])


def test_output_that_is_always_there__is_written_plainly(write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("if CONDITION:", "if row >= 0:"))
    assert "None if lse_ptr is None" not in draft(file, WITH)["backward"]

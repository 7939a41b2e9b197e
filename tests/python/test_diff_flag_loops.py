"""Loops that go on with what a flag alone gives them: pointers and sums that there are on one side only."""

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
def total_kernel(x_ptr, i_ptr, y_ptr, z_ptr, n, stride, PICKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    if PICKED:
        i_ptrs = i_ptr + cols * stride
        kept = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        mask = start + cols < n
        x = tl.load(x_ptr + row * n + start + cols, mask=mask, other=0.0)
        if PICKED:
            x = tl.where(tl.load(i_ptrs, mask=mask, other=0) > 0, x, 0.0)
            kept += tl.sin(x)
            i_ptrs += BLOCK * stride
        total += x * x
    tl.store(y_ptr + row, tl.sum(total, axis=0))
    if PICKED:
        tl.store(z_ptr + row, tl.sum(kept, axis=0))


@autodiff(inputs_require_grad=(0,))
def totals(x, picks):
    m, n = x.shape
    y, z = torch.empty(m, device=x.device), torch.zeros(m, device=x.device)
    stride = 0 if picks is None else picks.stride(0)
    total_kernel[(m,)](x, picks, y, z, n, stride, PICKED=picks is not None, BLOCK=16)
    return y, z


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.arange(dims["N"], device=device) % 3 if dims.get("picked") else None
"""
PLAIN = {"M": 3, "N": 40}
PICKED = {"M": 2, "N": 23, "picked": True}


@pytest.mark.parametrize(("first", "other"), [(PLAIN, PICKED), (PICKED, PLAIN)])
def test_loop_with_what_a_flag_alone_gives_it__runs_on_both_sides(
    first: dict, other: dict, write: Callable[[str], Path]
) -> None:
    file = write(SOURCE)
    assert_right(file, draft(file, first), [(first, "normal"), (other, "normal")])


def test_pointer_that_steps_under_a_flag__is_not_carried(write: Callable[[str], Path]) -> None:
    """Its address is one of the loop's variable, as that of a pointer without a flag."""
    backward = draft(write(SOURCE), PICKED)["backward"]
    assert "i_ptrs =" in backward and "i_ptrs_2 =" not in backward, backward

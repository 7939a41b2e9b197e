"""Loops whose steps each write the lanes of their own number: nothing of what they carry is taped."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

SOLVE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def solve_kernel(l_ptr, b_ptr, x_ptr, n, R, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    rhs = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_N)
    offs = j[:, None] * R + rhs[None, :]
    mask = (j[:, None] < n) & (rhs[None, :] < R)
    x = tl.load(b_ptr + offs, mask=mask, other=0.0)
    for i in range(n):
        row = tl.load(l_ptr + i * n + j, mask=j < i, other=0.0)
        known = tl.sum(row[:, None] * x, axis=0)
        x = tl.where(j[:, None] == i, x - known[None, :], x)
    tl.store(x_ptr + offs, x, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def solve(l, b):
    x = torch.empty_like(b)
    n, R = b.shape
    solve_kernel[(triton.cdiv(R, 16),)](l, b, x, n, R, BLOCK_N=triton.next_power_of_2(n), BLOCK_R=16)
    return x


SWEEP = [{"n": 13, "R": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    n = dims["n"]
    l = torch.randn(n, n, device=device, dtype=dtype) / n
    return l, torch.randn(n, dims["R"], device=device, dtype=dtype)
"""
LOOP, WRITTEN = "for i in range(n):", "tl.where(j[:, None] == i, x - known[None, :], x)"
DIMS = {"n": 13, "R": 20}
OTHERS = [(DIMS, "normal"), ({"n": 5, "R": 3}, "normal"), ({"n": 1, "R": 17}, "normal")]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(SOLVE, tmp_path / "solve.py")


ONCE = {
    "a substitution": (LOOP, LOOP),
    "upwards": (LOOP, "for i in range(n - 1, -1, -1):"),
    "the row behind": (WRITTEN, "tl.where(j[:, None] == i + 1, x - known[None, :], x)"),
    "the row before, upwards": (WRITTEN, "tl.where(j[:, None] == n - 2 - i, x - known[None, :], x)"),
    "from the second row on": (LOOP, "for i in range(1, n):"),
    "what is kept first": (WRITTEN, "tl.where(j[:, None] != i, x, x - known[None, :])"),
    "what is added in a row alone": (WRITTEN, "x - tl.where(j[:, None] == i, known[None, :], 0.0)"),
    "what is added first": (WRITTEN, "tl.where(j[:, None] == i, -known[None, :], 0.0) + x"),
    "step and lanes the other way round": (WRITTEN, "tl.where(i == j[:, None], x - known[None, :], x)"),
}


@pytest.mark.parametrize("edit", ONCE.values(), ids=ONCE)
def test_lanes_that_a_step_writes_once__need_no_tape(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert result["report"]["tape_bytes"] == 0 and "tape_x" not in result["backward"]
    assert_right(file, result, OTHERS)


MORE = {
    "every second row": (LOOP, "for i in range(0, n, 2):"),
    "all rows from it on": (WRITTEN, "tl.where(j[:, None] >= i, x - known[None, :], x)"),
    "all but it": (WRITTEN, "tl.where(j[:, None] == i, x, x - known[None, :])"),
    "one row again and again": (WRITTEN, "tl.where(j[:, None] == n // 2, x - known[None, :], x)"),
    "other lanes too": (WRITTEN, "tl.where(j[:, None] == i, x - known[None, :], x * 0.9)"),
    "a row less what it was": (WRITTEN, "tl.where(j[:, None] == i, known[None, :], 0.0) - x"),
    "what is added elsewhere": (WRITTEN, "x - tl.where(j[:, None] == i, 0.0, 0.1 * known[None, :])"),
    "a little everywhere": (WRITTEN, "x - tl.where(j[:, None] == i, known[None, :], 0.1)"),
    "every second row, by its number": (WRITTEN, "tl.where(j[:, None] == 2 * i, x - known[None, :], x)"),
    "a row that changes with itself": (WRITTEN, "tl.where(j[:, None] == i + i, x - known[None, :], x)"),
    "no row's number": (WRITTEN, "tl.where(j[:, None] == i - i, x - known[None, :], x)"),
    "the same lanes twice": (WRITTEN, "tl.where(j[:, None] == i // 2, x - known[None, :], x)"),
}


@pytest.mark.parametrize("edit", MORE.values(), ids=MORE)
def test_lanes_that_may_be_written_otherwise__are_taped_and_right(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert result["report"]["tape_bytes"] > 0
    assert_right(file, result, OTHERS)

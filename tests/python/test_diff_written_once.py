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


DIVIDED = (WRITTEN, "tl.where(j[:, None] == i, (x - known[None, :]) / pivot, x)")
PIVOT = ("        known =", "        pivot = tl.load(p_ptr + i).to(tl.float32)\n        known =")
GIVEN = ("solve_kernel(l_ptr,", "solve_kernel(l_ptr, p_ptr,")
PIVOTS = (
    ("(0, 1))\ndef solve(l, b):", "(0, 1, 2))\ndef solve(l, b, p):"),
    ("](l, b,", "](l, p, b,"),
    (
        'dims["R"], device=device, dtype=dtype)',
        'dims["R"], device=device, dtype=dtype), 2 + torch.rand(n, device=device).to(dtype)',
    ),
)
BACK = {
    "a substitution": (),
    "with a divisor": (DIVIDED, PIVOT, GIVEN, *PIVOTS),
    "upwards": ((LOOP, "for i in range(n - 1, -1, -1):"), ("mask=j < i", "mask=(j > i) & (j < n)")),
    "a row chosen by a comparison": (
        ("row[:, None] * x", "tl.where(i > j[:, None], row[:, None] * x, 0.0)"),
    ),
}


@pytest.mark.parametrize("edits", BACK.values(), ids=BACK)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_a_loop_ends_with__is_read_back_and_no_step_computed_again(
    changed, edits: tuple[tuple[str, str], ...], dtype: str
) -> None:
    file = changed(*edits)
    result = draft(file, DIMS, dtype=dtype)
    kernel = result["backward"].partition("\n\n\ndef ")[0]
    assert kernel.count("\n    for ") == 1 and "\n        known =" not in kernel
    assert "x_ptr" in kernel and "b_ptr +" not in kernel.replace("d_b_ptr +", "")
    assert_right(file, result, OTHERS, 1e-5 if dtype == "float32" else 4e-3, dtype)


AGAIN = {
    "what begins with something in lanes left out": (
        "mask=mask, other=0.0)\n    for",
        "mask=mask, other=1.0)\n    for",
    ),
    "a loop that may go on beyond the rows": (LOOP, "for i in range(m):"),
    "what is stored with something added": ("tl.store(x_ptr + offs, x,", "tl.store(x_ptr + offs, x + 1.0,"),
    "what is stored in part": ("x, mask=mask)", "x, mask=mask & (j[:, None] > 0))"),
}


@pytest.mark.parametrize("edit", AGAIN.values(), ids=AGAIN)
def test_what_is_not_stored_as_it_is__is_computed_again(changed, edit: tuple[str, str]) -> None:
    more = (("x_ptr, n, R,", "x_ptr, n, m, R,"), ("x, n, R, BLOCK_N", "x, n, n + 0, R, BLOCK_N"))
    file = changed(edit, *more)
    result = draft(file, DIMS)
    assert result["backward"].partition("\n\n\ndef ")[0].count("\n    for ") == 2
    assert_right(file, result, OTHERS)


def test_lanes_that_no_mask_tells_apart__have_what_they_began_with(changed) -> None:
    file = changed(("mask=j < i", "mask=j < n"), ("row[:, None] * x", "row[:, None] * tl.exp(-x * x)"))
    result = draft(file, DIMS)
    assert "tl.where(j[:, None] < i, x" in result["backward"]
    assert_right(file, result, OTHERS)


def test_what_a_step_divides_by__is_inverted_once_a_step(changed) -> None:
    file = changed(DIVIDED, PIVOT, GIVEN, *PIVOTS)
    loop = draft(file, DIMS)["backward"].partition("for back in")[2].partition("# write gradients")[0]
    assert "inv_pivot = 1.0 / pivot" in loop and "d * inv_pivot" in loop
    assert loop.count("tl.sum(d, axis=0) * inv_pivot") == 1 and "d / pivot" not in loop

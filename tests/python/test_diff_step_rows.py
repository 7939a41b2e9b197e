"""What the steps of a substitution add to rows of a gradient: one product, of an owner for each matrix."""

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
    system = tl.program_id(0)
    rhs = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_N)
    offs = (system * n + j[:, None]) * R + rhs[None, :]
    mask = (j[:, None] < n) & (rhs[None, :] < R)
    x = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    for i in range(n):
        row = tl.load(l_ptr + (system * n + i) * n + j, mask=j < i, other=0.0).to(tl.float32)
        pivot = tl.load(l_ptr + (system * n + i) * n + i).to(tl.float32)
        known = tl.sum(row[:, None] * x, axis=0)
        x = tl.where(j[:, None] == i, (x - known[None, :]) / pivot, x)
    tl.store(x_ptr + offs, x, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def solve(l, b):
    x = torch.empty_like(b)
    systems, n, R = b.shape
    solve_kernel[(systems, triton.cdiv(R, 16))](
        l, b, x, n, R, BLOCK_N=max(16, triton.next_power_of_2(n)), BLOCK_R=16
    )
    return x


SWEEP = [{"S": 3, "n": 13, "R": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    S, n, R = dims["S"], dims["n"], dims["R"]
    l = torch.randn(S, n, n, device=device, dtype=dtype) / n + 1.5 * torch.eye(n, device=device, dtype=dtype)
    return l, torch.randn(S, n, R, device=device, dtype=dtype)
"""
DIMS = {"S": 3, "n": 13, "R": 20}
OTHERS = [(DIMS, "normal"), ({"S": 2, "n": 5, "R": 3}, "normal"), ({"S": 1, "n": 18, "R": 33}, "normal")]
LOOP, PIVOT = "for i in range(n):", "(x - known[None, :]) / pivot"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(SOLVE, tmp_path / "solve.py")


ROWS = {
    "with a pivot": (),
    "with ones on the diagonal": ((PIVOT, "x - known[None, :]"),),
    "from the second row on": ((LOOP, "for i in range(1, n):"),),
}


@pytest.mark.parametrize("edits", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_steps_add_to_rows__is_one_product(
    changed, edits: tuple[tuple[str, str], ...], dtype: str
) -> None:
    file = changed(*edits)
    result = draft(file, DIMS, dtype=dtype)
    text = result["backward"]
    loop, _, rest = text.partition("for back in")[2].partition("# write gradients")
    assert "tl.atomic_add" not in text and "d_l_ptr" not in loop and "tl.sum(d" in loop
    assert "tl.dot(" in rest and "spill_d_x" in rest
    assert {"num_warps": 1} in result["report"]["configs"]
    assert_right(file, result, OTHERS, 1e-5 if dtype == "float32" else 4e-3, dtype)


STEPS = {
    "times a number": ((PIVOT, "(x - known[None, :]) * 0.5"),),
    "upwards": ((LOOP, "for i in range(n - 1, -1, -1):"), ("mask=j < i", "mask=(j > i) & (j < n)")),
    "rows that later steps change": (("mask=j < i", "mask=j < n"),),
    "a product with the step": (("row[:, None] * x", "row[:, None] * x * (1.0 + 0.1 * i)"),),
    "rows at other places": (("* n + j, mask", "* n + n - 1 - j, mask"),),
    "a diagonal from elsewhere": (
        ("* n + i).to", "* n + n - 1 - i).to"),
        (") / pivot", ") / (1.0 + pivot * pivot)"),
    ),
    "a diagonal that is read twice": ((") / pivot", " * pivot) / pivot"),),
    "lanes behind the step alone": ((PIVOT, "x - tl.where(j[:, None] >= i, known[None, :], 0.0)"),),
}


@pytest.mark.parametrize("edits", STEPS.values(), ids=STEPS)
def test_what_is_no_row_of_what_the_loop_ends_with__stays_in_it_and_is_right(
    changed, edits: tuple[tuple[str, str], ...]
) -> None:
    file = changed(*edits)
    assert_right(file, draft(file, DIMS), OTHERS)


def test_fewer_than_a_product_sums_over__stay_with_the_steps(changed) -> None:
    file = changed(("triton.cdiv(R, 16)", "triton.cdiv(R, 8)"), ("BLOCK_R=16", "BLOCK_R=8"))
    result = draft(file, DIMS)
    assert "tl.dot(" not in result["backward"]
    assert_right(file, result, OTHERS)


def test_rows_that_nobody_owns__stay_with_the_steps(changed) -> None:
    file = changed(("l_ptr + (system * n + i) * n + j", "l_ptr + (system // 2 * n + i) * n + j"))
    result = draft(file, DIMS)
    assert (
        "tl.atomic_add(" in result["backward"].partition("for back in")[2].partition("# write gradients")[0]
    )
    assert_right(file, result, OTHERS)


def test_lanes_below_the_number_of_a_step__are_below_the_end_of_its_loop(changed) -> None:
    file = changed(
        ("tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)", "tl.arange(0, BLOCK_R)"),
        ("(systems, triton.cdiv(R, 16))", "(systems,)"),
        ("BLOCK_R=16", "BLOCK_R=triton.next_power_of_2(R)"),
        (PIVOT, "x - known[None, :]"),
    )
    result = draft(file, DIMS)
    assert "(1, n))" in result["backward"] and "tl.atomic_add" not in result["backward"]
    assert_right(file, result, OTHERS)

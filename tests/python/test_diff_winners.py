"""Values that a loop chooses, beside the number of the step that they are from: no tape, any order."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

POOL = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def pool_kernel(x_ptr, b_ptr, y_ptr, n, X, OX, k, stride, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, x0 = o // OX, o % OX * stride
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    winner = tl.full([BLOCK], -1, tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        for j in range(2):
            x = x0 + 2 * i + j
            mask = (o < n) & (x < X)
            value = tl.load(x_ptr + row * X + x, mask=mask, other=-float("inf"))
            wins = mask & ((value > best) | (winner < 0))
            best = tl.where(wins, value, best)
            winner = tl.where(wins, i * 2 + j, winner)
    tl.store(y_ptr + o, best + total, mask=o < n)


@autodiff(inputs_require_grad=(0, 1))
def pool(x, b, k, stride):
    rows, X = x.shape
    OX = (X - 1) // stride + 1
    y = torch.empty((rows, OX), device=x.device, dtype=x.dtype)
    n = y.numel()
    pool_kernel[(triton.cdiv(n, 32),)](x, b, y, n, X, OX, k, stride, BLOCK=32)
    return y + b


SWEEP = [{"rows": 3, "X": 21, "k": 2, "stride": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["rows"], dims["X"], device=device, dtype=dtype)
    return x, torch.randn(1, device=device, dtype=dtype), dims["k"], dims["stride"]
"""
DIMS = {"rows": 3, "X": 21, "k": 2, "stride": 2}
CASES = [
    (DIMS, "normal"),
    ({"rows": 2, "X": 40, "k": 3, "stride": 1}, "normal"),
    ({**DIMS, "k": 1}, "normal"),
]
SAID = "a number tells the step that is chosen"

NUMBER, WINS = "i * 2 + j, winner)", "mask & ((value > best) | (winner < 0))"
FIRST, TOTAL = "tl.full([BLOCK], -1, tl.int32)", "            winner = tl.where(wins, i * 2 + j, winner)\n"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(POOL, tmp_path / "pool.py")


def is_said(result: dict) -> bool:
    return any(SAID in line["reason"] for line in result["report"]["lines"])


TOLD = {
    "the first of the greatest": (WINS, WINS),
    "the last of the greatest": (WINS, "mask & ((value >= best) | (winner < 0))"),
    "the least": (WINS, "mask & ((value < best) | (winner < 0))"),
    "the last that there is": (WINS, "mask"),
}


@pytest.mark.parametrize("edit", TOLD.values(), ids=TOLD)
def test_choice_that_a_number_tells__needs_no_tape_and_no_atomics(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert is_said(result) and result["report"]["tape_bytes"] == 0 and result["report"]["atomics"] == 0
    assert_right(file, result, CASES)


def test_choice_of_one_loop__is_told_by_its_step(changed) -> None:
    inner = POOL[POOL.index("        for j in range(2):") : POOL.index("    tl.store(y_ptr")]
    flat = "".join(f"{line[4:]}\n" for line in inner.splitlines()[1:])
    file = changed((inner, flat.replace("2 * i + j", "i").replace("i * 2 + j", "i")))
    result = draft(file, DIMS)
    assert is_said(result) and result["report"]["tape_bytes"] == 0
    assert_right(file, result, CASES)


OTHERWISE = {
    "a first number that a step has too": (FIRST, "tl.zeros([BLOCK], tl.int32)"),
    "numbers that steps share": (NUMBER, "i + j, winner)"),
    "numbers by another count": (NUMBER, "i * k + j, winner)"),
    "a number that does not change": (NUMBER, "i * 0 + 3, winner)"),
    "a number of other steps": (TOTAL, TOTAL.replace("wins,", "mask,")),
    "what is used on the way": (TOTAL, f"{TOTAL}            total += tl.where(mask, 0.5 * best, 0.0)\n"),
    "a choice of what was chosen": (
        "best = tl.where(wins, value, best)",
        "best = tl.where(wins, value + tl.where(winner < 0, 0.0, 0.5 * best), best)",
    ),
    "a value that it begins with": (
        'tl.full([BLOCK], -float("inf"), tl.float32)',
        "tl.load(x_ptr + row * X, mask=o < n, other=0.0) * 0.1",
    ),
}


@pytest.mark.parametrize("edit", OTHERWISE.values(), ids=OTHERWISE)
def test_choice_that_no_number_tells__is_right_all_the_same(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert not is_said(result)
    assert_right(file, result, CASES)

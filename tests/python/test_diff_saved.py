"""Statistics that took a loop: a copy of the forward saves them, and the backward runs that loop no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft

ATTENTION = ROOT / "examples/attention.py"
FORWARD = '''
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def spread_kernel(x_ptr, y_ptr, N, scale=1.0, BLOCK: tl.constexpr = 256):
    """Each row less its mean, by its deviation."""
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0), axis=0)
    mean = total / N
    squares = 0.0
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        squares += tl.sum(tl.where(cols < N, (x - mean) * (x - mean), 0.0), axis=0)
    rstd = scale / tl.sqrt(squares / N + 0.1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols + start * 0, (x - mean) * rstd, mask=cols < N)  # ends here


@autodiff(inputs_require_grad=(0,))
def spread(x):
    y = torch.empty_like(x)
    spread_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=256)
    return y


SWEEP = [{"M": 8192, "N": 100000}]  # too long for a row in one block


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
'''
SHAPES = [({"M": 5, "N": 37}, "normal"), ({"M": 2, "N": 9001}, "slice"), ({"M": 1, "N": 1}, "normal")]


@pytest.fixture
def changed(tmp_path: Path):
    def make(*edits: tuple[str, str]) -> Path:
        text = FORWARD
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        file = tmp_path / "spread.py"
        file.write_text(text)
        return file

    return make


def saved(backward: str) -> list[str]:
    """The variables that the copy of the forward saves."""
    lines = [
        line for line in backward.splitlines() if line.endswith(" = torch.empty(") or "torch.empty(" in line
    ]
    return sorted(
        line.split()[0].removeprefix("saved_") for line in lines if line.strip().startswith("saved_")
    )


def test_attention__runs_over_the_keys_once_for_queries_and_once_for_keys() -> None:
    result = draft(ATTENTION, {"B": 1, "H": 2, "N": 65, "D": 16, "causal": True})
    backward = result["backward"]
    assert saved(backward) == ["row_max", "row_sum"]
    assert "correction" not in backward.split("def attention_kernel_saving")[0]
    assert result["report"]["atomics"] == 0
    cases = [
        ({"B": 2, "H": 3, "N": 130, "D": 24, "causal": True}, "normal"),
        ({"B": 1, "H": 2, "N": 33, "D": 16, "causal": False}, "slice"),
    ]
    assert_right(ATTENTION, result, cases)


def test_return_before_the_loop__saves_what_is_known_where_the_kernel_ends() -> None:
    file = ROOT / "examples/cross_entropy.py"
    result = draft(file, {"M": 9, "V": 4999})
    assert saved(result["backward"]) == ["running_max", "running_sum"]
    assert_right(file, result, [({"M": 9, "V": 4999}, "normal"), ({"M": 3, "V": 7}, "normal")])


def test_deviation_of_a_row__is_saved_in_place_of_what_it_is_made_of(changed) -> None:
    file = changed()
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["mean", "rstd", "squares"]
    long_rows = result["backward"].split("def spread_kernel_bwd(")[1].split("@triton.jit")[0]
    assert long_rows.count("for start in range") == 3
    assert "def spread_kernel_saving(" in result["backward"] and "scale=1.0" in result["backward"]
    assert_right(file, result, SHAPES)


@pytest.mark.parametrize(
    "edits",
    {
        "a name that means something else at the end": [("# ends here", "\n    mean = 1.0\n    total = 2.0")],
        "a kernel that is tuned": [
            ("@triton.jit", '@triton.autotune([triton.Config({"BLOCK": 256})], key=["N"])\n@triton.jit'),
            (", BLOCK=256)\n    return", ")\n    return"),
        ],
    }.values(),
)
def test_what_no_variable_holds_for_certain__is_computed_again(changed, edits) -> None:
    file = changed(*edits)
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == []
    assert_right(file, result, SHAPES)


def test_grid_that_is_a_function__is_asked_before_memory_is_made(changed) -> None:
    file = changed(("[(x.shape[0],)]", "[lambda meta: (x.shape[0] + 0 * meta['BLOCK'],)]"))
    result = draft(file, SHAPES[1][0])
    text = result["backward"]
    assert saved(text) and text.index("grid = grid(") < text.index("torch.empty(grid[0]")
    assert_right(file, result, SHAPES)


def test_name_that_is_taken__is_not_overwritten(changed) -> None:
    file = changed(
        ("    row = tl.program_id(0)\n", "    row = tl.program_id(0)\n    saved_mean = 3.0\n"),
        ("(x - mean) * rstd,", "(x - mean) * rstd * saved_mean / 3.0,"),
    )
    result = draft(file, SHAPES[1][0])
    assert "saved_mean_ = torch.empty(" in result["backward"]
    assert_right(file, result, SHAPES)


def test_name_that_only_a_branch_gives__is_no_variable_to_save(changed) -> None:
    file = changed(
        (
            "    mean = total / N\n",
            "    if N > 0:\n        mean = total / N\n    else:\n        mean = 0.0\n",
        ),
    )
    result = draft(file, SHAPES[1][0])
    assert saved(result["backward"]) == ["rstd", "squares", "total"]
    assert_right(file, result, SHAPES)

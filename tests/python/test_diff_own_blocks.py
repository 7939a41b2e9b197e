"""Blocks of the backward's own: where nothing that the forward stores hangs on the size of its blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, edits_of

ATTENTION = ROOT / "examples/attention.py"
TRACED = {"B": 1, "H": 2, "N": 65, "D": 16, "causal": True}
RAGGED = [
    ({"B": 2, "H": 2, "N": n, "D": 16, "causal": causal}, "normal")
    for n, causal in ((130, True), (33, False), (65, True))
]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(ATTENTION.read_text(), tmp_path / "attention.py")


def offered(result: dict) -> list[dict]:
    return [config for config in result["report"]["configs"] if "BLOCK_M" in config]


@pytest.mark.parametrize("blocks", [(32, 64), (16, 128), (64, 64), (128, 64), (256, 32)])
def test_other_blocks__give_the_same_gradients(blocks: tuple[int, int]) -> None:
    m, n = blocks
    result = draft(ATTENTION, TRACED, config={"BLOCK_M": m, "BLOCK_N": n, "num_warps": 8})
    assert f"if grid[0] * BLOCK_M % {m} == 0:" in result["backward"]
    assert f"(grid[0] * BLOCK_M // {m}, grid[1]), {m}, {n}" in result["backward"]
    assert result["report"]["atomics"] == 0 and "saved_row_max" in result["backward"]
    assert_right(ATTENTION, result, RAGGED)


def test_call_with_other_blocks__has_the_backwards_own_too(changed) -> None:
    file = changed(("BLOCK_M, BLOCK_N = 64, 32\n", "BLOCK_M, BLOCK_N = (64, 32) if N > 40 else (16, 16)\n"))
    result = draft(file, TRACED, config={"BLOCK_M": 32, "BLOCK_N": 64})
    assert "if 32 % BLOCK_M == 0 and N <= grid[0] * BLOCK_M:" in result["backward"]
    assert_right(file, result, RAGGED)


# A row sees 24 up to itself: one that does not exist sees none, where it is far enough from the others.
WINDOW = (
    ("BLOCK_M, BLOCK_N = 64, 32\n", "BLOCK_M, BLOCK_N = 16, 32\n"),
    (
        "            visible = visible & (cols[None, :] <= offs_m[:, None])\n",
        "            visible = visible & (cols[None, :] <= offs_m[:, None])\n"
        "            visible = visible & (cols[None, :] > offs_m[:, None] - 24)\n",
    ),
)
FULL, NARROW = ({"B": 1, "H": 2, "N": n, "D": 16, "causal": True} for n in (64, 40))


def test_call_whose_rows_they_do_not_divide__keeps_the_forwards(changed) -> None:
    """Rows that do not exist are not alike here: no more of them than the forward has."""
    file = changed(*WINDOW)
    result = draft(file, FULL, config={"BLOCK_M": 32})
    assert "if grid[0] * BLOCK_M % 32 == 0:" in result["backward"]
    assert "cdiv(grid[0]" not in result["backward"]
    assert_right(file, result, [(NARROW, "normal")])


def test_rows_that_are_empty_beyond_the_last__are_no_more_than_the_forwards(changed) -> None:
    file = changed(*WINDOW)
    result = draft(file, NARROW, config={"BLOCK_M": 128})
    assert "of the backward's own" not in result["backward"]
    assert not [config for config in offered(result) if config["BLOCK_M"] > 16]


def test_tuner__is_offered_blocks_before_warps() -> None:
    result = draft(ATTENTION, TRACED)
    assert offered(result)[0] == {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4}
    as_they_are = [config for config in offered(result) if "turned" not in config]
    assert [config["BLOCK_M"] for config in as_they_are] == [64, 64, 128]
    asked = [{"logsumexp": 1}, {"unmasked": 1}]  # in place of the others
    assert [config for config in result["report"]["configs"] if config in asked] == asked


LOADED = "k = tl.load(k_ptr + base + cols[:, None] * stride_n + offs_d[None, :]"
STORED = "o = acc / row_sum[:, None]"


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "columns that are read without a mask": (f"{LOADED}, mask=in_cols, other=0.0)", f"{LOADED})"),
        "a loop that ends early": (
            "tl.minimum(start_m + BLOCK_M, N)",
            "tl.minimum(start_m + BLOCK_M - 16, N)",
        ),
        "columns by their block": (
            "cols[None, :] <= offs_m[:, None])",
            "(cols[None, :] < start_m + BLOCK_M))",
        ),
        "a loop that begins late": ("range(0, end_n, BLOCK_N)", "range(start_m, end_n, BLOCK_N)"),
        "a block's size as a number": (STORED, f"{STORED} * BLOCK_N"),
        "rows by their place in the block": (STORED, f"{STORED} * tl.arange(0, BLOCK_M)[:, None]"),
        "a sum that each step halves": (
            "        row_max = new_max\n",
            "        row_max = new_max\n        acc *= 0.5\n",
        ),
    }.values(),
)
def test_what_hangs_on_the_blocks__keeps_them(changed, old: str, new: str) -> None:
    result = draft(changed((old, new)), TRACED)
    assert not offered(result)
    forced = draft(changed((old, new)), TRACED, config={"BLOCK_M": 32, "BLOCK_N": 64})
    assert "of the backward's own" not in forced["backward"]

"""One block for several axes of a product: each has a name of its own in the backward, and other sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from test_diff_own_tiles import (
    CHOSEN,
    MATMUL,
    OWN,
    RAGGED,
    ROW_BY_ROW,
    STORED,
    TRACED,
    TWO_AXES,
    WIDE,
    few_programs_are_enough,
    offered,
)

__all__ = ["few_programs_are_enough"]

ONE_BLOCK = (
    ("    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,", "    BLOCK: tl.constexpr,"),
    ("BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,", "BLOCK=32,"),
    *[(f"BLOCK_{axis}", "BLOCK") for axis in "MNK"],
)
APART = {**OWN, "apart": 1}
FORWARD = "BLOCK_M = BLOCK_N = BLOCK_K = BLOCK\n"
PROGRAMS = 'triton.cdiv(M, meta["BLOCK_M"]),'


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(MATMUL.read_text(), tmp_path / "matmul.py", once=False)


@pytest.mark.parametrize("edits", [(), TWO_AXES, ROW_BY_ROW], ids=["swizzled", "two axes", "row by row"])
def test_one_block_for_all_axes__has_a_name_for_each(changed, edits: tuple[tuple[str, str], ...]) -> None:
    of_three = offered(draft(changed(*edits), TRACED, dtype="float16"))
    file = changed(*edits, *ONE_BLOCK)
    assert offered(draft(file, TRACED, dtype="float16")) == of_three and of_three[0]["apart"] == 1
    for config in (OWN, APART, {**APART, "saved": 1}):
        result = draft(file, TRACED, config=config)
        assert FORWARD in result["backward"] and CHOSEN in result["backward"]
        own = 0 if "apart" not in config else 1 if edits == ROW_BY_ROW else 2
        assert result["backward"].count("# tiles of this kernel's own") == own
        assert ("saved_acc" in result["backward"]) == ("saved" in config and edits != ROW_BY_ROW)
        assert_right(file, result, [*RAGGED, *WIDE])


def test_one_block_for_rows_and_columns__has_a_name_for_each(changed) -> None:
    file = changed(
        ("BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr", "BLOCK: tl.constexpr"),
        ("BLOCK_M=64, BLOCK_N=64", "BLOCK=64"),
        ("BLOCK_M", "BLOCK"),
        ("BLOCK_N", "BLOCK"),
    )
    result = draft(file, TRACED, config=APART)
    assert "BLOCK_M = BLOCK_N = BLOCK\n" in result["backward"]
    assert result["backward"].count("# tiles of this kernel's own") == 2
    assert_right(file, result, [*RAGGED, *WIDE])


def test_one_block_that_a_helper_takes__has_a_name_for_each_axis(changed) -> None:
    """The helper is called for rows, and for columns."""
    head, body = "def tile(number, BLOCK: tl.constexpr):", "return number * BLOCK + tl.arange(0, BLOCK)"
    helper = f"@triton.jit\n{head}\n    {body}\n\n\n"
    file = changed(
        *ONE_BLOCK,
        ("@triton.jit\ndef matmul_kernel(", f"{helper}@triton.jit\ndef matmul_kernel("),
        ("pid_m * BLOCK + tl.arange(0, BLOCK)", "tile(pid_m, BLOCK)"),
        ("pid_n * BLOCK + tl.arange(0, BLOCK)", "tile(pid_n, BLOCK)"),
    )
    result = draft(file, TRACED, config=APART)
    assert FORWARD in result["backward"]
    assert_right(file, result, [*RAGGED, *WIDE])


def test_configuration_of_a_namesake__is_not_for_the_axes_of_a_product(changed) -> None:
    """Another kernel of the file may have a block of as many lanes by that name."""
    file = changed(*ONE_BLOCK)
    result = draft(file, TRACED, config={"BLOCK": 1024})
    assert CHOSEN not in result["backward"] and "1024" not in result["backward"]
    assert_right(file, result, RAGGED)


def test_block_that_an_autotuner_chooses__has_a_name_for_each_axis(changed) -> None:
    listed = '@triton.autotune(configs=[triton.Config({"BLOCK": 32, "GROUP_M": 4})], key=["M"])\n'
    file = changed(
        *ONE_BLOCK,
        ("@triton.jit\ndef matmul_kernel(", f"{listed}@triton.jit\ndef matmul_kernel("),
        ("        BLOCK=32, GROUP_M=8,\n", ""),
        ("        num_warps=4, num_stages=3,\n", ""),
    )
    result = draft(file, TRACED, config=APART)
    assert 'BLOCK_M = BLOCK_N = BLOCK_K = MATMUL_KERNEL_CONFIG["BLOCK"]' in result["backward"]
    assert_right(file, result, [*RAGGED, *WIDE])


def test_block_that_is_a_number_too__is_the_forwards_there(changed) -> None:
    file = changed(*ONE_BLOCK, (STORED, "(acc * BLOCK).to(c_ptr.dtype.element_ty)"))
    result = draft(file, TRACED, config=APART)
    assert FORWARD in result["backward"] and "* BLOCK\n" in result["backward"]
    assert_right(file, result, [*RAGGED, *WIDE])


def test_call_of_other_programs_than_its_tiles__keeps_the_forwards_block(changed) -> None:
    file = changed(
        *TWO_AXES,
        (PROGRAMS, 'triton.cdiv(M, meta["BLOCK_M"]) - (M > 100),'),
        ("c = torch.empty((M, N)", "c = torch.zeros((M, N)"),
        *ONE_BLOCK,
    )
    result = draft(file, TRACED, config=APART)
    assert FORWARD in result["backward"]
    assert_right(file, result, RAGGED)


ONE = {
    "a tile and its transpose": (STORED, "(acc + tl.trans(acc)).to(c_ptr.dtype.element_ty)"),
    "a name that is taken": ("    acc = tl.zeros(", "    BLOCK_K = 1\n    acc = BLOCK_K * tl.zeros("),
    "the numbers of tiles": (STORED, "tl.where(pid_m == pid_n, acc, 0.0).to(c_ptr.dtype.element_ty)"),
    "places in the tile": (
        STORED,
        "tl.where(tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :], acc, 0.0)"
        ".to(c_ptr.dtype.element_ty)",
    ),
    "a tile in another shape": (STORED, "tl.reshape(tl.trans(acc), (BLOCK, BLOCK))"),
}


@pytest.mark.parametrize("edit", ONE.values(), ids=ONE)
def test_block_of_axes_that_are_tied__stays_one(changed, edit: tuple[str, str]) -> None:
    file = changed(*ONE_BLOCK, edit)
    assert not offered(draft(file, TRACED))
    result = draft(file, TRACED, config=APART)
    assert CHOSEN not in result["backward"]
    assert_right(file, result, RAGGED)


def test_one_block__of_tiles_that_are_stored_in_each_others_place__stays(changed) -> None:
    """Rows of one axis are rows of the other there, in blocks that are not turned themselves."""
    file = changed(
        *TWO_AXES,
        *ONE_BLOCK,
        (
            "    c_ptrs = c_ptr + offs_m[",
            "    offs_m = pid_n * BLOCK + tl.arange(0, BLOCK)\n"
            "    offs_n = pid_m * BLOCK + tl.arange(0, BLOCK)\n"
            "    c_ptrs = c_ptr + offs_m[",
        ),
        (
            "element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))",
            "element_ty), mask=(offs_m[:, None] < N) & (offs_n[None, :] < M))",
        ),
    )  # fmt: skip
    dims = {"M": 70, "N": 70, "K": 50, "leaky": True}
    assert not [config for config in draft(file, dims)["report"]["configs"] if "BLOCK" in config]
    result = draft(file, dims, config={"BLOCK": 64})
    assert CHOSEN not in result["backward"]
    assert_right(file, result, [(dims, "normal")])

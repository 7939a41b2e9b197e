"""Tiles of a product that the forward saves as a matrix, so that the backward does not multiply again."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from test_diff_own_tiles import (
    AUTOTUNED,
    CHOSEN,
    MATMUL,
    OWN,
    RAGGED,
    SCALED,
    STORED,
    TRACED,
    TWO_AXES,
    WIDE,
    few_programs_are_enough,
    offered,
)

SAVED = {**OWN, "apart": 1, "saved": 1}
STORE = "tl.store(\n            saved_acc + offs_m[:, None].to(tl.int64) * N + offs_n[None, :],"
RELU = (STORED, "tl.where(acc > 0, acc, 0.1 * acc).to(c_ptr.dtype.element_ty)")


__all__ = ["few_programs_are_enough"]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(MATMUL.read_text(), tmp_path / "matmul.py", once=False)


def main_kernel(backward: str) -> str:
    return backward.split("def matmul_kernel_bwd(")[1].split("@triton.jit")[0]


@pytest.mark.parametrize("edits", [(), TWO_AXES, AUTOTUNED], ids=["swizzled", "two axes", "autotuned"])
def test_tile_in_front_of_an_activation__is_saved_where_its_flag_is_set(
    changed, edits: tuple[tuple[str, str], ...]
) -> None:
    file = changed(*edits)
    plain, *others = offered(draft(file, TRACED))
    assert others[0] == {**plain, "saved": 1}
    result = draft(file, TRACED, config=SAVED)
    backward = result["backward"]
    assert f"    if ACTIVATION == 'leaky_relu':\n        {STORE}" in backward
    assert "M * N if ACTIVATION == 'leaky_relu' else 0, dtype=torch.float32" in backward
    assert "tl.dot" not in main_kernel(backward) and "matmul_kernel_saving[" in backward
    assert_right(file, result, [*RAGGED, *WIDE])


def test_tile_that_is_always_wanted__is_always_saved(changed) -> None:
    file = changed(RELU)
    result = draft(file, TRACED, config=SAVED)
    assert STORE.replace("\n            ", "\n        ") in result["backward"]
    assert "saved_acc = torch.empty(M * N, dtype=torch.float32" in result["backward"]
    assert "tl.dot" not in main_kernel(result["backward"])
    assert_right(file, result, [*RAGGED, *WIDE])


def test_sums_over_tiles__are_of_the_saved_ones(changed) -> None:
    file = changed(*SCALED)
    result = draft(file, TRACED, config=SAVED)
    assert "tl.dot" not in main_kernel(result["backward"]) and "spill_d__" in result["backward"]
    assert_right(file, result, [*RAGGED, *WIDE])


NOT_SAVED = {
    "products alone": ("acc = leaky_relu(acc)", "acc *= 2.0"),
    "rows without a variable": ("    c_ptrs =", "    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)\n    c_ptrs ="),
    "a length that changes": ("    if ACTIVATION ==", "    N = N + 0\n    if ACTIVATION =="),
}  # fmt: skip


@pytest.mark.parametrize("edit", NOT_SAVED.values(), ids=NOT_SAVED)
def test_tile_that_cannot_be_saved(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    assert not any(config.get("saved") for config in offered(draft(file, TRACED)))
    result = draft(file, TRACED, config=SAVED)
    assert "saved_acc" not in result["backward"] and CHOSEN in result["backward"]
    assert_right(file, result, RAGGED)

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


def test_lanes_beyond_the_matrix__have_what_the_forward_has_there(changed) -> None:
    """They have no upstream: with zero in them the sum of a column would be zero times infinity."""
    zeros = "acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)"
    file = changed(
        *SCALED,
        (zeros, zeros.replace("zeros(", "full(").replace("N), ", "N), 8.0, ")),
        (STORED, "(1.0 / acc).to(c_ptr.dtype.element_ty)"),
    )
    result = draft(file, TRACED, config=SAVED)
    assert "saved_acc" in result["backward"]
    assert_right(file, result, RAGGED, 1e-3)


def test_tile_of_which_lanes_beyond_the_matrix_have_anything__is_not_saved(changed) -> None:
    """Ones are loaded there, and summed."""
    loaded = "(offs_k[None, :] < k_left), other=0.0)"
    file = changed(
        RELU,
        (
            f"a_ptrs, mask=(offs_m[:, None] < M) & {loaded}",
            f"a_ptrs, mask=(offs_m[:, None] < M) & {loaded}".replace("0.0", "1.0"),
        ),
        (
            "        acc = tl.dot(",
            "        a = tl.where(offs_k[None, :] < k_left, a, 0.0)\n        acc = tl.dot(",
        ),
    )
    result = draft(file, TRACED, config=SAVED)
    assert "saved_acc" not in result["backward"] and CHOSEN in result["backward"]
    assert_right(file, result, RAGGED)


def in_helper(call: str) -> tuple[tuple[str, str], ...]:
    """Edits that put the loop into a helper; `call`: a statement with its call, `product()`."""
    text = MATMUL.read_text()
    begin, end = text.index("    acc = tl.zeros("), text.index("    if ACTIVATION")
    names = "a_ptrs, b_ptrs, offs_m, offs_n, offs_k, M, N, K, stride_ak, stride_bk"
    blocks = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    head = f"@triton.jit\ndef product({names}, {', '.join(f'{one}: tl.constexpr' for one in blocks)}):\n"
    written = call.replace("product()", f"product({names}, {', '.join(blocks)})")
    helper = f"{head}{text[begin:end].rstrip()}\n    return acc\n\n\n"
    kernel = "@triton.jit\ndef matmul_kernel("
    return ((text[begin:end], f"    {written}\n\n"), (kernel, helper + kernel))


IN_HELPER = {
    "acc = product()": "acc = product(",
    "acc = product() * 2.0": "acc_ = product(",
    "acc = tl.exp(0.1 * product())": "acc_ = product(",
}


@pytest.mark.parametrize("call", IN_HELPER)
def test_tile_that_a_helper_gives__is_saved_where_it_is_called(changed, call: str) -> None:
    file = changed(*in_helper(call), RELU)
    assert offered(draft(file, TRACED))[1]["saved"] == 1
    result = draft(file, TRACED, config=SAVED)
    copy = result["backward"].split("def matmul_kernel_saving(")[1].split("@triton.jit")[0]
    assert IN_HELPER[call] in copy and copy.count("product(") == 1
    assert "tl.dot" not in main_kernel(result["backward"])
    assert_right(file, result, [*RAGGED, *WIDE])


def test_tiles_of_two_calls_in_a_statement__are_both_saved(changed) -> None:
    """The second is written over several lines."""
    names = ("BLOCK_M, BLOCK_N, BLOCK_K)", "BLOCK_M,\n        BLOCK_N, BLOCK_K,\n    )")
    call = "acc = tl.exp(0.1 * product()) * (1.0 + product())"
    (loop, written), helper = in_helper(call)
    first, second = written.rsplit("product(", 1)
    other = second.replace("b_ptrs", "b_ptrs + 0 * K").replace(*names)
    file = changed((loop, f"{first}product({other}"), helper, RELU)
    result = draft(file, TRACED, config=SAVED)
    copy = result["backward"].split("def matmul_kernel_saving(")[1].split("@triton.jit")[0]
    assert copy.count("product(") == 2 and "acc = tl.exp(0.1 * acc_) * (1.0 + acc__)\n" in copy
    assert_right(file, result, [*RAGGED, *WIDE])


def test_value_that_a_helper_makes_of_a_tile__is_saved(changed) -> None:
    """Rows beyond the last have the bias, whatever is saved."""
    file = changed(
        *in_helper("acc = product()"),
        ("    return acc\n", "    return acc + 8.0\n"),
        *SCALED,
        (STORED, "(1.0 / acc).to(c_ptr.dtype.element_ty)"),
    )
    result = draft(file, TRACED, config=SAVED)
    assert "other=tl.full([BLOCK_M, BLOCK_N], 8.0, tl.float32)" in main_kernel(result["backward"])
    assert_right(file, result, RAGGED, 1e-3)


HELD = {
    "in a branch": (
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n    if GROUP_M > 1:\n        acc += product()"
    ),
    "under another name": "acc = product()\n    acc = product() if K > 0 else acc",
}


def test_value_of_a_helper_that_does_not_spare_its_loop__is_not_saved(changed) -> None:
    """The gradient of a square is made of what is squared."""
    file = changed(*in_helper("acc = product()"), ("    return acc\n", "    return acc * acc\n"))
    result = draft(file, TRACED, config=SAVED)
    assert "matmul_kernel_saving" not in result["backward"]
    assert_right(file, result, RAGGED)


@pytest.mark.parametrize("call", HELD.values(), ids=HELD)
def test_tile_that_a_helper_gives_in_a_branch__is_not_saved(changed, call: str) -> None:
    file = changed(*in_helper(call), RELU)
    result = draft(file, TRACED, config=SAVED)
    assert "matmul_kernel_saving" not in result["backward"]
    assert_right(file, result, RAGGED)

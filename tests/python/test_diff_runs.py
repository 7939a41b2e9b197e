"""Gradients at an address that a table tells, summed over runs of entries that name the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from test_diff_stored_rows import CASES, DIMS, FORWARD

KERNEL = "def tiles_kernel_bwd_w("
TABLE = "table = torch.stack([expert, (ends - sizes)[expert] + tile * 16], dim=1)"
LOAD = "w = tl.load(w_ptr + expert * K * N + k[:, None] * N + n[None, :], mask=w_mask, other=0.0)"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "grouped.py")


def kernel(backward: str, head: str = KERNEL) -> str:
    return backward.split(head)[1].split("\n\n\n")[0]


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("float16", 2e-3)])
@pytest.mark.parametrize("runs", [1, 5, 512])
def test_programs_walk_entries_and_add_where_the_index_changes(changed, runs: int, dtype: str, bound: float):
    file = changed()
    result = draft(file, DIMS, config={"runs": runs}, dtype=dtype)
    made = kernel(result["backward"])
    assert re.search(r"for \w+ in tl.range\(first, ", made) and "tl.dot(" in made
    assert made.count("tl.atomic_add(d_w_ptr") == 2  # where the index changes, and at the end
    assert "tl.atomic_add(d_w_ptr" not in kernel(result["backward"], "def tiles_kernel_bwd(")
    assert "d_w_ptr = gradient_of(w_ptr, accumulate=True)" in result["backward"]
    assert_right(file, result, CASES, bound, dtype)


def test_what_tells_rows_is_loaded_turns_before_them(changed):
    """An entry tells the expert, the expert where its rows end: three loads, the last two turns ahead."""
    made = kernel(draft(changed(), DIMS, config={"runs": 5})["backward"])
    held = "4 * BLOCK * BLOCK + 24 * BLOCK_M * BLOCK"
    assert f"num_stages=7 if {held} <= 229376 else None" in made
    file = changed(("end = tl.load(ends_ptr + expert)", "end = M"))
    assert "num_stages=5 if " in kernel(draft(file, DIMS, config={"runs": 5})["backward"])


@pytest.mark.parametrize("order", ["flip(0)", "roll(1, 0)"])
@pytest.mark.parametrize("runs", [1, 6])
def test_entries_may_stand_in_any_order(changed, order: str, runs: int):
    file = changed((TABLE, f"{TABLE}.{order}"))
    assert_right(file, draft(file, DIMS, config={"runs": runs}), CASES)


def test_entries_that_change_in_every_step(changed):
    """Even entries first, then odd ones: of one expert and of the next in turn."""
    file = changed(
        (TABLE, f"{TABLE}\n    table = torch.stack([*table[::2], *table[1::2]]) if len(table) else table")
    )
    dims = {"sizes": [33, 1, 31, 2, 16], "N": 33, "K": 20}
    assert_right(file, draft(file, DIMS, config={"runs": 1}), [(dims, "normal"), *CASES])


def test_gradients_at_one_address_are_summed_in_one_kernel(changed):
    file = changed(
        (LOAD, f"{LOAD} + {LOAD[4:].replace('w_ptr', 'v_ptr')}"),
        ("x_ptr, w_ptr, ends_ptr", "x_ptr, w_ptr, v_ptr, ends_ptr"),
        ("(x, w, ends, table", "(x, w, v, ends, table"),
        ("def grouped(x, w, sizes)", "def grouped(x, w, v, sizes)"),
        ("(0, 1)", "(0, 1, 2)"),
        ("return x, torch.randn(", "w = torch.randn("),
        ("dtype=dtype), sizes", "dtype=dtype)\n    return x, w, w.flip(1).contiguous(), sizes"),
    )
    result = draft(file, DIMS, config={"runs": 5})
    made = kernel(result["backward"], "def tiles_kernel_bwd_w_v(")
    assert made.count("tl.atomic_add(d_w_ptr") == made.count("tl.atomic_add(d_v_ptr") == 2
    assert_right(file, result, CASES)


def test_they_are_offered_together_with_owners_of_rows(changed):
    file = changed()
    result = draft(file, DIMS)
    offered = [config for config in result["report"]["configs"] if "runs" in config]
    assert {config["runs"] for config in offered} == {512, 2048}
    assert all(config["disjoint"] for config in offered)
    assert KERNEL not in result["backward"]
    taken = draft(file, DIMS, config=offered[0])
    assert taken["report"]["atomics"] == 1  # said of it still
    assert "def tiles_kernel_bwd(" not in taken["backward"]
    assert_right(file, taken, CASES)


MORE = ("torch.randn(len(sizes), dims", "torch.randn(len(sizes) + 9, dims")
REFUSED = {
    "an address that has the entry's own number": (
        (LOAD, LOAD.replace("expert * K * N", "(expert + tl.program_id(0)) * K * N")), MORE,
    ),
    "an index that two programs tell": (
        (LOAD, LOAD.replace("expert * K", "tl.load(table_ptr + tl.program_id(0) + tl.program_id(1)) * K")), MORE,
    ),
    "indices of lanes": (
        (LOAD, LOAD.replace("n[None, :],", "n[None, :] + 0 * lane[None, :],").replace("0 *", "K * N *")), MORE,
        ("end = tl.load(ends_ptr", "lane = tl.load(table_ptr + tl.program_id(0) + tl.arange(0, BLOCK) % 2) % 2\n    end = tl.load(ends_ptr"),
    ),
    "weights that a condition leaves out": ((LOAD, LOAD.replace("mask=w_mask", "mask=w_mask & (expert < 9)")),),
    "weights in a branch": (
        (LOAD, f"w = tl.zeros([BLOCK, BLOCK], x.dtype)\n        if end > 3:\n            {LOAD}"),
    ),
    "steps that data counts": (("range(0, K, BLOCK)", "range(0, K + tl.load(ends_ptr) // 99, BLOCK)"),),
    "what is no product": (
        ("acc = tl.dot(x, w, acc, input_precision=\"ieee\")", "acc += tl.sum(x, 1)[:, None] + tl.sum(w, 0)[None, :]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("edits", REFUSED.values(), ids=REFUSED)
def test_what_is_no_run_is_added_by_each_program(changed, edits: tuple):
    result = draft(changed(*edits), DIMS, config={"runs": 512})
    assert KERNEL not in result["backward"] and "tl.atomic_add(d_w_ptr" in result["backward"]
    assert not any("could not be written" in line["reason"] for line in result["report"]["lines"])
    assert not any("runs" in config for config in result["report"]["configs"])


TILES = {"BLOCK_N": 64, "BLOCK_K": 16, "disjoint": 1, "runs": 5}
WIDE = ({"sizes": [40, 3, 0, 30], "N": 112, "K": 80}, "normal")


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("float16", 2e-3)])
def test_columns_have_tiles_of_their_own_beside_rows_of_a_table(changed, dtype: str, bound: float):
    """BLOCK stands for columns and for what is summed; BLOCK_M, of which the table is made, stays."""
    file = changed()
    result = draft(file, WIDE[0], config=TILES, dtype=dtype)
    backward = result["backward"]
    assert "BLOCK_M: tl.constexpr" in kernel(backward) and "BLOCK: tl.constexpr" not in kernel(backward)
    assert "BLOCK_N, BLOCK_K = (grid[0], triton.cdiv(N, 64)), 64, 16" in backward
    assert not re.search(r"BLOCK_M = .*\d", backward)
    assert_right(file, result, [WIDE, *CASES], bound, dtype)


def test_each_kernel_may_have_tiles_of_its_own(changed):
    file = changed()
    assert_right(file, draft(file, WIDE[0], config={**TILES, "apart": 1}), [WIDE, *CASES])


def test_one_block_for_all_axes_is_that_of_rows_still(changed):
    """Calls have blocks of their own, that the table is made of."""
    file = changed(
        ("BLOCK_M: tl.constexpr, BLOCK: tl.constexpr", "BLOCK: tl.constexpr"),
        ("acc = tl.zeros([BLOCK_M, BLOCK]", "acc = tl.zeros([BLOCK, BLOCK]"),
        ("tl.arange(0, BLOCK_M)", "tl.arange(0, BLOCK)"),
        ("ends = sizes.cumsum(0)", "ends = sizes.cumsum(0)\n    B = 32 if K > 70 else 16"),
        ("(sizes + 15) // 16", "(sizes + B - 1) // B"),
        ("tile * 16", "tile * B"),
        ("triton.cdiv(N, 32)", "triton.cdiv(N, B)"),
        ("BLOCK_M=16, BLOCK=32", "BLOCK=B"),
    )
    for config in (TILES, {"disjoint": 1, "runs": 5}):
        result = draft(file, WIDE[0], config=config)
        own = "BLOCK_N, BLOCK_K = (grid[0], triton.cdiv(N, 64)), 64, 16"
        assert (own in result["backward"]) == ("BLOCK_M=BLOCK" in result["backward"]) == (config is TILES)
        assert_right(file, result, [WIDE, *CASES])


def test_tiles_are_offered_with_what_owns_gradients_there_alone(changed):
    file = changed()
    result = draft(file, DIMS)
    assert {"BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, "disjoint": 1, "runs": 512} in (
        result["report"]["configs"]
    )
    assert all("runs" in config for config in result["report"]["configs"] if "BLOCK_N" in config)
    alone = {"BLOCK_N": 64, "BLOCK_K": 16}
    assert draft(file, DIMS, config=alone)["backward"] == result["backward"]


BATCHED = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def batched_kernel(
    x_ptr, w_ptr, index_ptr, y_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2)
    index = tl.load(index_ptr + b)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_mask = (m[:, None] < M) & (k[None, :] < K)
        x = tl.load(x_ptr + (b * M + m[:, None]) * K + k[None, :], mask=x_mask, other=0.0)
        w_mask = (k[:, None] < K) & (n[None, :] < N)
        w = tl.load(w_ptr + (index * K + k[:, None]) * N + n[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    y_mask = (m[:, None] < M) & (n[None, :] < N)
    y_offs = (b * M + m[:, None]) * N + n[None, :]
    tl.store(y_ptr + y_offs, acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0, 1))
def batched(x, w, index):
    B, M, K = x.shape
    N = w.shape[2]
    y = torch.empty((B, M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), B)
    batched_kernel[grid](x, w, index, y, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
    return y


SWEEP = [{"index": [0, 0, 2, 2, 2, 1, 0], "M": 48, "N": 32, "K": 80}]


def make_args(dims, device="cuda", dtype=torch.float32):
    index = torch.tensor(dims["index"], device=device)
    x = torch.randn(len(index), dims["M"], dims["K"], device=device, dtype=dtype)
    return x, torch.randn(3, dims["K"], dims["N"], device=device, dtype=dtype), index
"""
BATCH = {"index": [0, 0, 2, 2, 2, 1, 0], "M": 48, "N": 32, "K": 80}


@pytest.mark.parametrize("config", [{}, {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "apart": 1}])
@pytest.mark.parametrize("runs", [1, 60, 512])
def test_weights_that_an_index_of_a_batch_chooses(tmp_path: Path, config: dict, runs: int):
    """A run is of a grid axis, beside another that is summed; its kernel may have tiles of its own."""
    file = edits_of(BATCHED, tmp_path / "batched.py")()
    result = draft(file, BATCH, config={**config, "runs": runs})
    made = kernel(result["backward"], "def batched_kernel_bwd_w(")
    assert made.count("tl.atomic_add(d_w_ptr") == made.count("        for ") + 1 == 2
    assert result["report"]["atomics"] == 1  # rows have owners by themselves
    cases = [(BATCH, "normal"), ({"index": [1, 2, 1, 2, 1], "M": 5, "N": 33, "K": 17}, "normal")]
    assert_right(file, result, [*cases, ({"index": [2], "M": 70, "N": 3, "K": 1}, "expanded")])

"""Gradients of rows that data tells, where the stores of an output keep the rows apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

FORWARD = """
import torch
import triton
import triton.language as tl

from kernel_agent import autodiff


@triton.jit
def tiles_kernel(
    x_ptr, w_ptr, ends_ptr, table_ptr, y_ptr, z_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.load(table_ptr + 2 * tl.program_id(0))
    end = tl.load(ends_ptr + expert)
    first = tl.load(table_ptr + 2 * tl.program_id(0) + 1)
    m = first + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_M, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x_mask = (m[:, None] < end) & (k[None, :] < K)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=x_mask, other=0.0)
        w_mask = (k[:, None] < K) & (n[None, :] < N)
        w = tl.load(w_ptr + expert * K * N + k[:, None] * N + n[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    y_mask = (m[:, None] < end) & (n[None, :] < N)
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@autodiff(inputs_require_grad=(0, 1))
def grouped(x, w, sizes):
    M, K = x.shape
    N = w.shape[2]
    ends = sizes.cumsum(0)
    tiles = (sizes + 15) // 16
    expert = torch.repeat_interleave(torch.arange(len(tiles), device=x.device), tiles)
    tile = torch.arange(len(expert), device=x.device) - (tiles.cumsum(0) - tiles)[expert]
    table = torch.stack([expert, (ends - sizes)[expert] + tile * 16], dim=1)
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    z = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (table.shape[0], triton.cdiv(N, 32))
    tiles_kernel[grid](x, w, ends, table, y, z, M, N, K, BLOCK_M=16, BLOCK=32)
    return y


SWEEP = [{"sizes": [7, 0, 40, 1], "N": 40, "K": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    sizes = torch.tensor(dims["sizes"], device=device)
    x = torch.randn(int(sizes.sum()), dims["K"], device=device, dtype=dtype)
    return x, torch.randn(len(sizes), dims["K"], dims["N"], device=device, dtype=dtype), sizes
"""
DIMS = {"sizes": [7, 0, 40, 1], "N": 40, "K": 33}
CASES = [
    (DIMS, "normal"),
    (DIMS, "expanded"),
    ({"sizes": [16, 5], "N": 32, "K": 64}, "normal"),
    ({"sizes": [1, 1, 50], "N": 3, "K": 1}, "transposed"),
    ({"sizes": [0, 0], "N": 5, "K": 7}, "normal"),
]
STORE = "tl.store(y_ptr + m[:, None] * N + n[None, :], acc.to(y_ptr.dtype.element_ty), mask=y_mask)"
OWNER = "def tiles_kernel_bwd_x("
OFFER = {"disjoint": 1}
ROWS_ALONE = ("inputs_require_grad=(0, 1)", "inputs_require_grad=(0,)")


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "grouped.py")


def rows_kernel(backward: str) -> str:
    return backward.split(OWNER)[1].split("\n\n\n")[0]


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("float16", 2e-3)])
def test_one_program_owns_rows_that_a_table_tells(changed, dtype: str, bound: float):
    file = changed()
    result = draft(file, DIMS, config=OFFER, dtype=dtype)
    assert "atomic" not in rows_kernel(result["backward"])
    said = result["backward"].replace("\n    #   ", " ")
    assert "owned tiles: one program a tile, whose rows are apart as those of" in said
    assert result["report"]["atomics"] == 1  # of the weights
    assert_right(file, result, CASES, bound, dtype)


def test_it_is_offered_and_not_taken_by_itself(changed):
    result = draft(changed(ROWS_ALONE), DIMS)
    assert OFFER in result["report"]["configs"]
    assert OWNER not in result["backward"] and result["report"]["atomics"] == 1


def test_rows_that_are_loaded_one_by_one(changed):
    """What tells a row may be a block, and lie along another axis than the store's rows do."""
    file = changed(
        ("m = first + tl.arange(0, BLOCK_M)",
         "m = tl.load(z_ptr + first + tl.arange(0, BLOCK_M), mask=first + tl.arange(0, BLOCK_M) < end, other=M)"),
        ("z = torch.empty((M, N), device=x.device, dtype=x.dtype)",
         "z = torch.arange(M, device=x.device).flip(0)"),
        ("end = tl.load(ends_ptr + expert)", "end = tl.load(ends_ptr + expert)\n    bound = M"),
        ("(m[:, None] < end) & (k[None, :] < K)", "(m[:, None] < bound) & (k[None, :] < K)"),
        ("y_mask = (m[:, None] < end) & (n[None, :] < N)", "y_mask = (n[:, None] < N) & (m[None, :] < bound)"),
        (STORE, STORE.replace("m[:, None] * N + n[None, :]", "m[None, :] * N + n[:, None]").replace("acc.to", "tl.trans(acc).to")),
    )  # fmt: skip
    result = draft(file, DIMS, config=OFFER)
    assert "atomic" not in rows_kernel(result["backward"])
    assert_right(file, result, CASES)


LONGER = ("y = torch.empty((M, N)", "y = torch.zeros((2 * M + 8, N)")
REFUSED = {
    "a store that leaves out rows": ((STORE, STORE.replace("mask=y_mask", "mask=y_mask & (m[:, None] > 0)")),),
    "columns that data moves": ((STORE, STORE.replace("n[None, :],", "n[None, :] + expert,")), LONGER),
    "columns that entries move": (
        (STORE, STORE.replace("n[None, :],", "n[None, :] + tl.program_id(0),")), LONGER,
    ),
    "a part of rows": (("x_ptr + m[:, None] * K", "x_ptr + m[:, None] // 2 * K"),),
    "rows that overlap": (("x_ptr + m[:, None] * K", "x_ptr + m[:, None]"),),
    "a store of other rows": (
        (STORE, STORE.replace("m[:, None] * N", "(m + tl.program_id(0))[:, None] * N")), LONGER,
    ),
    "rows of two axes": (
        ("x_ptr + m[:, None] * K + k[None, :]", "x_ptr + m[:, None] + (m - first)[None, :]"),
        ("x_mask = (m[:, None] < end) & (k[None, :] < K)", "x_mask = (m[:, None] < end) & (m[None, :] < end)"),
        ("first + tl.arange(0, BLOCK_M)", "first + tl.arange(0, BLOCK)"),
        ("BLOCK_M: tl.constexpr, BLOCK: tl.constexpr", "BLOCK: tl.constexpr"),
        ("acc = tl.zeros([BLOCK_M, BLOCK]", "acc = tl.zeros([BLOCK, BLOCK]"),
        ("BLOCK_M=16, BLOCK=32", "BLOCK=16"),
    ),
    "rows of some columns' programs": (
        ("m = first + ", "on = tl.load(ends_ptr + expert * (tl.program_id(1) // 9)) >= 0\n    m = first + "),
        ("(m[:, None] < end) & (k", "on & (m[:, None] < end) & (k"),
        ("y_mask = (m", "y_mask = on & (m"),
    ),
    "a store under a condition": ((STORE, f"if end > 3:\n        {STORE}"),),
    "an output of other rows": (
        (STORE, f"{STORE}\n    {STORE.replace('y_ptr', 'z_ptr').replace('m[:, None] * N', 'm[:, None] // 2 * N')}"),
        ("return y", "return y, z"),
    ),
    "steps that differ between programs": (
        (STORE, "for part in range(tl.load(table_ptr + 2 * tl.program_id(0)) + 1):\n        "
         + STORE.replace("n[None, :],", "n[None, :] + part * M * N,")),
        ("y = torch.empty((M, N)", "y = torch.zeros((9 * M, N)"),
    ),
    "a sum in place of a store": (
        (STORE, STORE.replace("tl.store", "tl.atomic_add").replace("acc.to(y_ptr.dtype.element_ty)", "acc")),
        ("y = torch.empty", "y = torch.zeros"),
    ),
}  # fmt: skip


def test_a_program_with_whole_rows_stores_them_itself(changed):
    """Where an address tells all programs and steps, no kernel of its own is needed."""
    file = changed(
        ("n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "n = tl.arange(0, BLOCK)"),
        ("(table.shape[0], triton.cdiv(N, 32))", "(table.shape[0],)"),
    )
    dims = {"sizes": [7, 0, 40, 1], "N": 20, "K": 33}
    result = draft(file, dims, config=OFFER)
    assert "tl.store(d_x_ptr" in result["backward"].split("def tiles_kernel_bwd(")[1].split("\n\n\n")[0]
    assert OWNER not in result["backward"] and result["report"]["atomics"] == 1
    said = result["backward"].replace("\n    #   ", " ")
    assert "one program owns each element of d_x, whose rows are apart as those of" in said
    assert "tl.store(d_x_ptr" not in draft(file, dims)["backward"]
    assert_right(file, result, [(dims, "normal"), ({"sizes": [16, 5], "N": 32, "K": 64}, "expanded")])


def test_rows_that_are_read_twice_are_not_stored_twice(changed):
    file = changed(
        ("n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)", "n = tl.arange(0, BLOCK)"),
        ("(table.shape[0], triton.cdiv(N, 32))", "(table.shape[0],)"),
        (
            "    y_mask = (m",
            "    acc += tl.load(x_ptr + m * K, mask=m < end, other=0.0)[:, None]\n    y_mask = (m",
        ),
    )
    dims = {"sizes": [7, 0, 40, 1], "N": 20, "K": 33}
    result = draft(file, dims, config=OFFER)
    assert not any("could not be written" in line["reason"] for line in result["report"]["lines"])
    assert_right(file, result, [(dims, "normal")])


def test_each_output_keeps_rows_apart(changed):
    """In a loop, too, whose steps all programs make; some output may have no columns."""
    file = changed(
        (STORE, f"{STORE}\n    for part in range(P):\n        "
         + STORE.replace("y_ptr +", "z_ptr + part * M * N +").replace("acc", "(acc * (part + 1))")),
        ("M, N, K, BLOCK_M: tl.constexpr", "M, N, K, P, BLOCK_M: tl.constexpr"),
        ("M, N, K, BLOCK_M=16", "M, N, K, P, BLOCK_M=16"),
        ("z = torch.empty((M, N)", "P = N % 3\n    z = torch.empty((P, M, N)"),
        ("return y", "return y, z"),
    )  # fmt: skip
    result = draft(file, DIMS, config=OFFER)
    assert "atomic" not in rows_kernel(result["backward"])
    assert_right(file, result, CASES)


@pytest.mark.parametrize("edits", REFUSED.values(), ids=REFUSED)
def test_what_a_store_does_not_keep_apart_stays_atomic(changed, edits: tuple):
    result = draft(changed(*edits), DIMS, config=OFFER)
    assert OWNER not in result["backward"]
    assert not any("disjoint" in config for config in result["report"]["configs"])

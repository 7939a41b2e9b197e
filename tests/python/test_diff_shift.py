"""Sums that are replaced by a number on rows beyond the end: the maximum is detached only if no store sees
those rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"M": 5, "N": 13}}]


@triton.jit
def kernel(x_ptr, y_ptr, M, N, R: tl.constexpr, C: tl.constexpr):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, C)
    at = rows[:, None] * N + cols[None, :]
    mask = (rows[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + at, mask=mask, other=-1.0e30)
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    total = tl.sum(e, axis=1)
    total = tl.where({cond}, total, 1.0)
    y = e / total[:, None]
{store}


@autodiff(inputs_require_grad=(0,))
def stub(x):
    M, N = x.shape
    y = torch.zeros_like(x)
    kernel[(triton.cdiv(M, 4),)](x, y, M, N, R=4, C=triton.next_power_of_2(N))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""
STORE = "    tl.store(y_ptr + at, y, mask=mask)"
CASES = {  # condition, store, whether the maximum is detached
    "unseen": ("rows < M", STORE, True),
    "fewer_rows_than_are_stored": ("rows < M - 1", STORE, False),
    "some_columns": ("tl.sum(x, axis=1) < 0.0", STORE, False),
    "summed_over_rows": ("rows < M", "    tl.atomic_add(y_ptr + cols, tl.sum(y, axis=0), mask=cols < N)", False),
    "whole_tile": ("rows < M", STORE.replace("mask=mask", "mask=(cols[None, :] < N) & (rows[:, None] < M + 0 * N)"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_replaced_rows__are_ignored_only_where_no_store_sees_them(name: str, tmp_path: Path) -> None:
    cond, store, detached = CASES[name]
    file = tmp_path / f"{name}.py"
    file.write_text(SOURCE.format(cond=cond, store=store))
    result = draft(file, {"M": 5, "N": 13})
    found = any(line["class"] == "max" for line in result["report"]["lines"])
    assert detached is None or found == detached
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 13), (8, 16), (1, 1))])

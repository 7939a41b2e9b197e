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


APART = {  # each of these uses several maxima at once: they do not cancel together
    "sum_over_the_rows_that_have_maxima": """
    e = tl.where(mask, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
    tl.store(y_ptr + cols, tl.sum(e, axis=0) / tl.sum(tl.sum(e, axis=1), axis=0), mask=cols < N)""",
    "product_with_another_rows": """
    e = tl.where(mask, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
    total = tl.sum(e, axis=1)
    tl.store(y_ptr + at, e * tl.trans(e) / (total * total)[:, None], mask=mask)""",
    "dot_over_the_rows_that_have_maxima": """
    e = tl.where(mask, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
    y = tl.dot(tl.trans(e), tl.where(mask, x, 0.0)) / tl.sum(tl.sum(e, axis=1), axis=0)
    tl.store(y_ptr + at, y, mask=mask)""",
    "rows_turned_round": """
    e = tl.where(mask, tl.exp(x - tl.max(x, axis=1)[:, None]), 0.0)
    y = tl.flip(e, 0) / tl.sum(e, axis=1)[:, None]
    tl.store(y_ptr + at, y, mask=mask)""",
    "largest_of_each_step": """
    best = tl.full((R, C), -float("inf"), tl.float32)
    left = x
    for k in range(3):
        best = tl.where(cols[None, :] == k, tl.max(left, axis=1)[:, None], best)
        left = tl.where(cols[None, :] == tl.argmax(left, axis=1)[:, None], -float("inf"), left)
    e = tl.exp(best - tl.max(best, axis=1)[:, None])
    tl.store(y_ptr + at, e / tl.sum(e, axis=1)[:, None], mask=mask & (cols[None, :] < 3))""",
}  # fmt: skip
ONLINE = {  # running maxima that do cancel, with sums that begin with the first step's
    "maxima_along_the_last_axis": """
    m = tl.max(x, axis=1)
    total = tl.trans(tl.exp(x - m[:, None]))
    for k in range(1, 3):
        s = tl.where(mask, x * (k + 1.0), -1.0e30)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        total = total * tl.exp(m - m_new)[None, :] + tl.trans(tl.exp(s - m_new[:, None]))
        m = m_new
    y = tl.trans(total) / tl.sum(total, axis=0)[:, None]
    tl.store(y_ptr + at, y, mask=mask)""",
    "squares": """
    m = tl.max(x, axis=1)
    first = tl.exp(x - m[:, None])
    total = tl.sum(first, axis=1)
    squares = first * first
    for k in range(1, 3):
        s = tl.where(mask, x * (k + 1.0), -1.0e30)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        total = total * alpha + tl.sum(p, axis=1)
        squares = squares * (alpha * alpha)[:, None] + p * p
        m = m_new
    tl.store(y_ptr + at, squares / (total * total)[:, None], mask=mask)""",
    "maxima_with_an_axis_of_one_element": """
    m = tl.max(x[:, None, :], axis=2)
    total = tl.exp(x[:, None, :] - m[:, :, None])
    for k in range(1, 3):
        s = tl.where(mask, x * (k + 1.0), -1.0e30)[:, None, :]
        m_new = tl.maximum(m, tl.max(s, axis=2))
        total = total * tl.exp(m - m_new)[:, :, None] + tl.exp(s - m_new[:, :, None])
        m = m_new
    y = tl.reshape(total / tl.sum(total, axis=2)[:, :, None], (R, C))
    tl.store(y_ptr + at, y, mask=mask)""",
}


def one_program(body: str) -> str:
    lines = SOURCE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    e = "))
    text = "\n".join([*lines[:first], body.strip("\n"), *lines[lines.index("{store}") + 1 :]])
    launch = "kernel[(triton.cdiv(M, 4),)](x, y, M, N, R=4, C=triton.next_power_of_2(N))"
    assert launch in text
    return text.replace(launch, "kernel[(1,)](x, y, M, N, R=16, C=16)").replace("{{", "{").replace("}}", "}")


@pytest.mark.parametrize("name", sorted(APART))
def test_several_maxima__are_not_moved_as_one(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(one_program(APART[name]))
    result = draft(file, {"M": 5, "N": 13})
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 13), (16, 16))])


@pytest.mark.parametrize("name", sorted(ONLINE))
def test_a_start_value__moves_to_the_final_maximum(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(one_program(ONLINE[name]))
    result = draft(file, {"M": 5, "N": 13})
    assert [line["class"] for line in result["report"]["lines"]].count("D") == 1
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 13), (16, 16))])

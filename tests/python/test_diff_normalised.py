"""Online softmax that divides by the running sum in each step, as the first flash attention does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 50, "D": 16}]


@triton.jit
def soft_kernel(q_ptr, k_ptr, v_ptr, o_ptr, n, d, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    at = rows[:, None] * d + dims[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < n, other=0.0)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = ACC
    last = tl.where(tl.program_id(0) == 0, n, STEPS)
    for start in range(0, last, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        there = cols[:, None] * d + dims[None, :]
        k = tl.load(k_ptr + there, mask=cols[:, None] < n, other=0.0)
        v = tl.load(v_ptr + there, mask=cols[:, None] < n, other=0.0)
        s = tl.where(cols[None, :] < n, tl.dot(q, tl.trans(k)), -float("inf"))
        STEP
        top = top_new
        total = total_new
    tl.store(o_ptr + at, OUT, mask=rows[:, None] < n)


@autodiff(inputs_require_grad=(0, 1, 2))
def soft(q, k, v):
    n, d = q.shape
    o = torch.empty_like(q)
    soft_kernel[(triton.cdiv(n, 16),)](q, k, v, o, n, d, BLOCK=16, BLOCK_D=d)
    return o


def make_args(dims, device="cuda", dtype=torch.float32):
    shape = dims["N"], dims["D"]
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
"""
BEGIN = """block_top = tl.max(s, axis=1)
        top_new = tl.maximum(top, block_top)
        alpha = tl.exp(top - top_new)
        """
STEPS = {
    "of blocks": """p = tl.exp(s - block_top[:, None])
        beta = tl.exp(block_top - top_new)
        total_new = alpha * total + beta * tl.sum(p, axis=1)
        p = p * (beta / total_new)[:, None]
        acc = acc * (total / total_new * alpha)[:, None]
        acc += tl.dot(p.to(v.dtype), v)""",
    "reciprocal": """p = tl.exp(s - top_new[:, None])
        total_new = alpha * total + tl.sum(p, axis=1)
        inverse = 1.0 / total_new
        acc *= (total * alpha * inverse)[:, None]
        acc = tl.dot(p * inverse[:, None], v, acc)""",
    "whole": """p = tl.exp(s - top_new[:, None])
        total_new = alpha * total + tl.sum(p, axis=1)
        acc = (acc * (total * alpha)[:, None] + tl.dot(p, v)) / total_new[:, None]""",
    "columns": """p = tl.exp(s - top_new[:, None])
        total_new = alpha * total + tl.sum(p, axis=1)
        acc = acc * (total * alpha / total_new)[None, :]
        acc += tl.dot(tl.trans(v), tl.trans(p) / total_new[None, :])""",
}
LEFT_ALONE = {  # not of that form: right all the same
    "begins with something": ("tl.zeros([BLOCK, BLOCK_D], tl.float32) + 1.0", STEPS["whole"]),
    "is looked at": (
        "tl.zeros([BLOCK, BLOCK_D], tl.float32)",
        STEPS["whole"] + "\n        total_new += tl.sum(acc * acc, axis=1) * 0.01",
    ),
    "other rows": (
        "tl.zeros([BLOCK, BLOCK_D], tl.float32)",
        STEPS["whole"].replace("total_new[:, None]", "total_new[None, :]"),
    ),
}


def source(acc: str, step: str, out: str = "acc", steps: str = "n - 16") -> str:
    made = SOURCE.replace("ACC", acc).replace("STEPS", steps).replace("OUT", out)
    made = made if steps else made.replace("tl.where(tl.program_id(0) == 0, n, )", "n")
    return made.replace("STEP", BEGIN + step)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("steps", ["n - 16", "0"])
def test_sum_that_each_step_divides__is_carried_undivided(
    name: str, steps: str, write: Callable[[str], Path]
) -> None:
    """Without a tape, as if it were divided once after the loop; programs without steps leave zeros."""
    turned = name == "columns"
    acc = f"tl.zeros([{'BLOCK_D, BLOCK' if turned else 'BLOCK, BLOCK_D'}], tl.float32)"
    file = write(source(acc, STEPS[name], "tl.trans(acc)" if turned else "acc", steps))
    result = draft(file, {"N": 50, "D": 16})
    assert result["report"]["tape_bytes"] == 0
    assert_right(file, result, [({"N": n, "D": 16}, "normal") for n in (50, 16, 37)])


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_sum_of_another_form__is_differentiated_as_it_is(name: str, write: Callable[[str], Path]) -> None:
    acc, step = LEFT_ALONE[name]
    file = write(source(acc, step, steps=""))
    result = draft(file, {"N": 50, "D": 16})
    assert "divided once, after the loop" not in result["backward"]
    assert_right(file, result, [({"N": n, "D": 16}, "normal") for n in (50, 37)], 1e-4)


def test_number_that_each_step_divides_by__is_divided_by_once(write: Callable[[str], Path]) -> None:
    row = source("tl.zeros([BLOCK_D], tl.float32)", "", steps="")
    row = row.replace("tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "tl.program_id(0)")
    row = row.replace("rows[:, None] * d + dims[None, :]", "rows * d + dims").replace(
        "rows[:, None] < n", "dims < d"
    )
    row = row.replace('tl.full([BLOCK], -float("inf"), tl.float32)', '-float("inf")')
    row = row.replace("total = tl.zeros([BLOCK], tl.float32)", "total = 0.0")
    row = row.replace("cols[None, :] < n, tl.dot(q, tl.trans(k))", "cols < n, tl.sum(q[None, :] * k, axis=1)")
    row = row.replace("tl.max(s, axis=1)", "tl.max(s, axis=0)").replace("(triton.cdiv(n, 16),)", "(n,)")
    step = """p = tl.exp(s - top_new)
        total_new = alpha * total + tl.sum(p, axis=0)
        acc = acc * (total * alpha / total_new) + tl.sum((p / total_new)[:, None] * v, axis=0)
        top = top_new"""
    file = write(row.replace("top = top_new", step))
    result = draft(file, {"N": 50, "D": 16})
    assert result["report"]["tape_bytes"] == 0
    assert_right(file, result, [({"N": n, "D": 16}, "normal") for n in (50, 37)])

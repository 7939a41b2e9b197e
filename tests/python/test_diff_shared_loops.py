"""Few programs with a long loop: several share it, where what they sum adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

FORWARD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 20, "V": 300}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims[n], device=device, dtype=dtype) for n in ("M", "V"))


@triton.jit
def waves_kernel(x_ptr, w_ptr, y_ptr, M, V, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + rows, mask=rows < M, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + v, mask=v < V, other=0.0)
        total += tl.sum(tl.sin(x[:, None] * w[None, :]), axis=1)
    tl.store(y_ptr + rows, total, mask=rows < M)


@autodiff(inputs_require_grad=(0, 1))
def waves(x, w):
    y = torch.empty_like(x)
    waves_kernel[(triton.cdiv(x.shape[0], 16),)](x, w, y, x.shape[0], w.shape[0], BLOCK=16)
    return y
"""
STORED = "tl.store(y_ptr + rows, total,"
DIMS = {"M": 20, "V": 300}
# Many steps, one, none for most shares, more programs than shares.
CASES = [({"M": m, "V": v}, "normal") for m, v in ((20, 300), (16, 16), (3, 40), (100, 33))]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "waves.py")


@pytest.mark.parametrize("shares", [4, 512])
def test_few_programs_with_a_long_loop__may_share_it(changed, shares: int) -> None:
    file = changed()
    plain, asked = (draft(file, DIMS, config=config) for config in (None, {"shares": shares}))
    assert {"shares": 512} in plain["report"]["configs"] and "splits = max(" not in plain["backward"]
    assert f"splits = max({shares} // max(grid[0], 1), 1)" in asked["backward"]
    assert "    # - programs along axis 1 share the loop out" in asked["backward"]
    assert "waves_kernel_bwd[(grid[0], splits)](" in asked["backward"]
    assert "copies=splits, written=min(M, BLOCK * grid[0])" in asked["backward"]
    for result in (plain, asked):
        assert result["report"]["atomics"] == 0
        assert_right(file, result, CASES)


@pytest.mark.parametrize(
    ("edit", "stays"),
    [
        ((STORED, STORED.replace("total", "tl.where(rows < 7, 0.0, total * 3)")), True),
        ((STORED, STORED.replace("total", "total - x")), False),
        ((STORED, STORED.replace("total", "total * x")), False),
        (("total += tl.sum(", "total += total * 1e-3 + tl.sum("), False),
    ],
    ids=["times what it leaves alone", "beside what it does not sum", "of two loops", "states of a loop"],
)
def test_only_what_adds_up__is_shared(changed, edit: tuple[str, str], stays: bool) -> None:
    file = changed(edit)
    plain, asked = (draft(file, DIMS, config=config) for config in (None, {"shares": 4}))
    assert ({"shares": 512} in plain["report"]["configs"]) == stays
    assert ("splits = max(" in asked["backward"]) == stays
    assert_right(file, asked, CASES)


WALK = """    total = tl.zeros([BLOCK], tl.float32)
    walked = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + v, mask=v < V, other=0.0)
        walked += tl.sum(w, axis=0)
        total += tl.sin(x * walked)
"""


def test_sums_of_sums_so_far__are_not_shared(changed) -> None:
    """Each step needs what all steps before it have summed."""
    start, end = FORWARD.index("    total = tl.zeros"), FORWARD.index("    tl.store(y_ptr")
    file = changed((FORWARD[start:end], WALK), ("inputs_require_grad=(0, 1)", "inputs_require_grad=(0,)"))
    asked = draft(file, DIMS, config={"shares": 4})
    assert "splits = max(" not in asked["backward"]
    assert_right(file, asked, CASES)


@pytest.mark.parametrize("dims", [{"M": 20, "V": 250}, {"M": 2048, "V": 300}])
def test_short_loops_and_many_programs__are_not_shared(changed, dims: dict[str, int]) -> None:
    assert {"shares": 512} not in draft(changed(), dims)["report"]["configs"]


def test_a_loop_that_ends_with_its_last_value__is_not_shared(changed) -> None:
    """What a step leaves need not be an operation with two sides."""
    file = changed(
        ("total += tl.sum(tl.sin(x[:, None] * w[None, :]), axis=1)", "total = tl.load(w_ptr + v // 2)"),
        (STORED, STORED.replace("total", "total * x")),
        ("inputs_require_grad=(0, 1)", "inputs_require_grad=(0,)"),
    )
    result = draft(file, DIMS, config={"shares": 4})
    assert "splits" not in result["backward"]
    assert_right(file, result, [(DIMS, "normal")])

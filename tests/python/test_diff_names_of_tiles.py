"""A queue of tiles: a parameter may be called `tiles`, as the text around generated kernels calls a number of
its own; and one loop over all steps of all tiles is refused, with a remedy that works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from kernel_agent.errors import Unusable

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K,
    tiles: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):
    across = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * across, tiles):
        rows = (tile // across) * BM + tl.arange(0, BM)
        cols = (tile % across) * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(tl.cdiv(K, BK)):
            inner = step * BK + tl.arange(0, BK)
            a_mask = (rows < M)[:, None] & (inner < K)[None, :]
            b_mask = (inner < K)[:, None] & (cols < N)[None, :]
            a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], mask=a_mask, other=0.0)
            b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], mask=b_mask, other=0.0)
            acc = tl.dot(a, b, acc)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def op(a, b):
    (M, K), N = a.shape, b.shape[1]
    c = a.new_empty(M, N)
    product[(3,)](a, b, c, M, N, K, tiles=3, BM=16, BN=16, BK=16)
    return c


SWEEP = [{"M": 40, "N": 37, "K": 35}]


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)
"""
DIMS = [{"M": 40, "N": 37, "K": 35}, {"M": 16, "N": 16, "K": 16}, {"M": 1, "N": 65, "K": 3}]
CASES = [(dims, "normal") for dims in DIMS]
FLAT = [
    ("        acc = tl.zeros((BM, BN), tl.float32)\n        for step in range(tl.cdiv(K, BK)):\n", ""),
    (
        "    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * across, tiles):\n",
        """    steps = tl.cdiv(K, BK)
    own = tl.cdiv(M, BM) * across // tiles
    if tl.program_id(0) < tl.cdiv(M, BM) * across % tiles:
        own += 1
    tile = tl.program_id(0) - tiles
    step = -1
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(steps * own):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += tiles
""",
    ),
    ("            inner = ", "        inner = "),
    ("            a_mask = ", "        a_mask = "),
    ("            b_mask = ", "        b_mask = "),
    ("            a = ", "        a = "),
    ("            b = ", "        b = "),
    ("            acc = tl.dot", "        acc = tl.dot"),
    (
        "        tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=mask)\n",
        "        if step == steps - 1:\n"
        "            tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, mask=mask)\n"
        "            acc = tl.zeros((BM, BN), tl.float32)\n",
    ),
]


@pytest.mark.parametrize("schedule", ["partials", "owner", "atomic"])
def test_parameter_called_tiles__is_told_from_the_hosts_own(
    schedule: str, write: Callable[..., Path]
) -> None:
    file = write(SOURCE)
    result = draft(file, DIMS[0], schedule=schedule)
    assert_right(file, result, CASES)
    assert (result["report"]["atomics"] == 0) == (schedule != "atomic")


def test_parameter_called_tiles__leaves_a_long_grid_another_name(tmp_path: Path) -> None:
    longer = [
        (f" {old},", f" {new},")
        for old, new in (("M", "number_of_rows_of_the_left"), ("N", "number_of_columns_of_the_right"))
    ]
    longer += [
        ("across = tl.cdiv(N, BN)", "across = tl.cdiv(number_of_columns_of_the_right, BN)"),
        ("< M)", "< number_of_rows_of_the_left)"),
        ("tl.cdiv(M", "tl.cdiv(number_of_rows_of_the_left"),
    ]
    longer += [("* N +", "* number_of_columns_of_the_right +"), ("< N)", "< number_of_columns_of_the_right)")]
    kernel, host = SOURCE.split("@autodiff", 1)
    file = edits_of(kernel, tmp_path / "long.py", once=False)(*longer)
    file.write_text(file.read_text() + "@autodiff" + host)
    result = draft(file, DIMS[0])
    assert "tiles_ = " in result["backward"] and result["report"]["atomics"] == 0
    assert_right(file, result, CASES)


def test_one_loop_over_all_steps_of_all_tiles__is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    """The remedy is SOURCE as it is, which the test above differentiates."""
    file = edits_of(SOURCE, tmp_path / "flat.py")(*FLAT)
    with pytest.raises(Unusable, match="not known before the launch") as caught:
        draft(file, DIMS[0])
    assert "one over tiles, `for tile in range(" in str(caught.value.remedy)

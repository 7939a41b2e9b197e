"""Rows of one block, of which the backward may have a tile in each program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

FORWARD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"M": 5, "N": 20}}]


def make_args(dims, device="cuda", dtype=torch.float32):
    made = [torch.randn(s, device=device, dtype=dtype) for s in ((dims["M"], dims["N"]), (dims["N"],))]
    return tuple(made)


@triton.jit
def gate_kernel(x_ptr, w_ptr, y_ptr, z_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * N + cols, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    {body}
    tl.store(y_ptr + row * N + cols, y, mask=mask)


@autodiff(inputs_require_grad={grads})
def gate(x, w):
    M, N = x.shape
    x, y, z = x.contiguous(), torch.empty_like(x), torch.empty(M, device=x.device)
    gate_kernel[{grid}](x, w, y, z, N, BLOCK=triton.next_power_of_2(N), num_warps=8)
    return y
"""
GATE = "y = x * tl.sigmoid(x * w)"
TILE = {"BLOCK": 1024, "num_warps": 4}
SHAPES = [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (3, 1030), (2, 4096), (1, 1))]


def written(write: Callable[[str], Path], body: str = GATE, grid: str = "(M,)", grads: str = "(0,)") -> Path:
    return write(FORWARD.format(body=body, grid=grid, grads=grads))


@pytest.mark.parametrize(
    ("grid", "made"),
    [
        ("(M,)", "(grid[0], tiles)"),
        ("(M, 1, x.shape[0] // M)", "(grid[0], tiles, grid[2])"),
        ("lambda meta: (M,)", "(grid[0], tiles)"),
    ],
)
def test_tiles_of_a_row__have_programs_along_an_axis_of_their_own(
    grid: str, made: str, write: Callable[[str], Path]
) -> None:
    file = written(write, grid=grid)
    assert TILE in draft(file, {"M": 5, "N": 20})["report"]["configs"]
    result = draft(file, {"M": 5, "N": 20}, config=TILE)
    first = "tile * BLOCK" if len(made) < 20 else "tl.program_id(1) * BLOCK"
    assert f"cols = {first} + tl.arange(0, BLOCK)" in result["backward"]
    assert "tiles = max((min(N, BLOCK) + 1023) // 1024, 1)" in result["backward"]
    assert f"grid, BLOCK = {made}, min(BLOCK, 1024)" in result["backward"]
    assert "num_warps=4" in result["backward"]
    assert_right(file, result, SHAPES)


def test_programs_that_run_in_turn__have_tiles_of_one_row(write: Callable[[str], Path]) -> None:
    made = draft(written(write), {"M": 5, "N": 20}, config=TILE)["backward"]
    assert "at = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)" in made
    assert "tile, pid = at % tl.num_programs(1), at // tl.num_programs(1)" in made
    assert "row = pid.to(tl.int64)" in made


def test_row_that_is_not_masked_everywhere__has_programs_for_the_whole_block(
    write: Callable[[str], Path],
) -> None:
    source = FORWARD.format(body=GATE, grid="(M,)", grads="(0, 1)").replace('(dims["N"],)', "(4096,)")
    file = write(source.replace("w_ptr + cols, mask=mask, other=0.0", "w_ptr + cols"))
    result = draft(file, {"M": 5, "N": 20}, config=TILE)
    assert "tiles = max((BLOCK + 1023) // 1024, 1)" in result["backward"]
    assert_right(file, result, SHAPES)


def test_gradient_that_rows_share__is_right_in_tiles(write: Callable[[str], Path]) -> None:
    file = written(write, grads="(0, 1)")
    assert_right(file, draft(file, {"M": 5, "N": 20}, config=TILE), SHAPES)


@pytest.mark.parametrize(
    "body",
    [
        "y = x - tl.max(x, axis=0)",  # lanes meet
        GATE + "\n    tl.store(z_ptr + row, 1.0)",  # each tile would store it
        "y = x * (cols + BLOCK)",  # the size of the block is a number of its own
        "y = x + tl.num_programs(1)",
    ],
)
def test_row_that_is_more_than_its_lanes__is_left_whole(body: str, write: Callable[[str], Path]) -> None:
    file = written(write, body)
    assert TILE not in draft(file, {"M": 5, "N": 20})["report"]["configs"]
    result = draft(file, {"M": 5, "N": 20}, config=TILE)
    assert "tiles" not in result["backward"]
    assert_right(file, result, SHAPES)

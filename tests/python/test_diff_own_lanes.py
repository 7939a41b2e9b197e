"""Blocks of lanes that have nothing to do with each other: a backward may have wider ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diff_support import assert_right, draft, edits_of

GATED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gated_kernel(x_ptr, g_ptr, y_ptr, M, D, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < D
    g = tl.load(g_ptr + cols, mask=mask, other=0.0)
    x = tl.load(x_ptr + row * D + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * D + cols, x * tl.sigmoid(g), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def gated(x, g):
    M, D = x.shape
    y = torch.empty_like(x)
    gated_kernel[(M, triton.cdiv(D, 16))](x, g, y, M, D, BLOCK=16)
    return y


SWEEP = [{"M": 3, "D": 2050}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["D"], device=device, dtype=dtype)
"""
DIMS = {"M": 3, "D": 2050}
OTHERS = [(DIMS, "normal"), ({"M": 5, "D": 33}, "normal"), ({"M": 1, "D": 1}, "expanded")]
WIDE = {"BLOCK": 1024}
ASKED = "if grid[1] == triton.cdiv(D, BLOCK):"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(GATED, tmp_path / "gated.py")


def offered(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [config for config in result["report"]["configs"] if "BLOCK" in config]


def test_wider_blocks__are_offered_up_to_twice_the_row(changed) -> None:
    file = changed()
    assert offered(draft(file, DIMS)) == [{"BLOCK": 1024}, {"BLOCK": 512}]
    assert offered(draft(file, {"M": 3, "D": 300})) == [{"BLOCK": 512}]
    assert offered(draft(file, {"M": 3, "D": 40})) == []


@pytest.mark.parametrize("config", [WIDE, {"BLOCK": 512, "num_warps": 8}])
def test_wider_blocks__are_right_for_all_sizes(changed, config) -> None:
    file = changed()
    result = draft(file, DIMS, config=config)
    assert ASKED in result["backward"] and f"triton.cdiv(D, {config['BLOCK']})" in result["backward"]
    assert_right(file, result, OTHERS)


ALIKE = {
    "in one axis": (
        ("    row = tl.program_id(0)\n", "    row = 0\n"),
        ("tl.program_id(1) * BLOCK", "tl.program_id(0).to(tl.int64) * BLOCK"),
        ("(M, triton.cdiv(D, 16))", "(triton.cdiv(D, 16),)"),
        ('SWEEP = [{"M": 3', 'SWEEP = [{"M": 1'),
        ('torch.randn(dims["M"], dims["D"]', 'torch.randn(1, dims["D"]'),
    ),
    "in a loop over rows": (
        ("    row = tl.program_id(0)\n", ""),
        ("    x = tl.load", "    for row in range(M):\n      x = tl.load"),
        ("    tl.store", "      tl.store"),
        ("tl.program_id(1)", "tl.program_id(0)"),
        ("(M, triton.cdiv(D, 16))", "(triton.cdiv(D, 16),)"),
    ),
    "a grid that is a function": (
        ("(M, triton.cdiv(D, 16))", 'lambda meta: (M, triton.cdiv(D, meta["BLOCK"]))'),
    ),
}


@pytest.mark.parametrize("edits", ALIKE.values(), ids=ALIKE)
def test_other_ways_to_write_it__have_wider_blocks_too(changed, edits) -> None:
    file = changed(*edits)
    assert WIDE in offered(draft(file, DIMS))
    result = draft(file, DIMS, config=WIDE)
    assert "triton.cdiv(D, 1024)" in result["backward"]
    assert_right(file, result, OTHERS)


OUTER = """    both = cols[:, None] * D + cols[None, :]
    tl.store(y_ptr + both, x[:, None] * g[None, :], mask=mask[:, None] & mask[None, :])"""
TURNED = """    many = tl.arange(0, 16)
    at, inside = many[:, None] * D + cols[None, :], (many[:, None] < M) & mask[None, :]
    tl.store(y_ptr + at, tl.trans(tl.load(x_ptr + at, mask=inside, other=0.0)), mask=inside)"""
NEVER = {
    "lanes that are summed": (("x * tl.sigmoid(g)", "x * tl.sum(g, axis=0)"),),
    "a load without a mask": (("tl.load(g_ptr + cols, mask=mask, other=0.0)", "tl.load(g_ptr + cols % D)"),),
    "a block's number": (("x * tl.sigmoid(g)", "x * tl.sigmoid(g) * (tl.program_id(1) + 1)"),),
    "lanes that count from their block": (("x * tl.sigmoid(g)", "x * g * tl.arange(0, BLOCK)"),),
    "another length below which it stores": (
        ("x * tl.sigmoid(g), mask=mask", "x * tl.sigmoid(g), mask=cols < M * 683 + 1"),
    ),
    "another grid": (("triton.cdiv(D, 16))", "triton.cdiv(D, 16) + 1)"),),
    "an address that all blocks add to": (
        (
            "    tl.store(y_ptr",
            "    tl.atomic_add(y_ptr + row * D, tl.program_id(0) * 0.0 + 1.0)\n    tl.store(y_ptr",
        ),
        ("y = torch.empty_like(x)", "y = torch.zeros_like(x)"),
    ),
    "a tile turned around": (
        ("    tl.store(y_ptr + row * D + cols, x * tl.sigmoid(g), mask=mask)", TURNED),
        ("(M, triton.cdiv(D, 16))", "(1, triton.cdiv(D, 16))"),
    ),
    "lanes in each other's place": (
        ("    tl.store(y_ptr + row * D + cols, x * tl.sigmoid(g), mask=mask)", OUTER),
        ("y = torch.empty_like(x)", "y = torch.zeros((D, D), device=x.device)"),
        ("(M, triton.cdiv(D, 16))", "(1, triton.cdiv(D, 16))"),
    ),
    "programs that are counted": (("x * tl.sigmoid(g)", "x * tl.sigmoid(g) * tl.num_programs(1)"),),
}


@pytest.mark.parametrize("edits", NEVER.values(), ids=NEVER)
def test_what_hangs_on_its_block__keeps_it(changed, edits) -> None:
    file = changed(*edits)
    assert offered(draft(file, DIMS)) == []
    result = draft(file, DIMS, config=WIDE)
    assert "1024" not in result["backward"]


def test_call_with_another_grid__keeps_the_forwards_blocks(changed) -> None:
    """Of an odd number of rows, each has one program more, all of whose lanes are masked off."""
    file = changed(("(M, triton.cdiv(D, 16))", "(M, triton.cdiv(D, 16) + (M + 1) % 2)"))
    result = draft(file, DIMS, config=WIDE)
    assert ASKED in result["backward"]
    assert_right(file, result, [*OTHERS, ({"M": 4, "D": 40}, "normal")])

"""Loops whose reverse needs a few numbers of the block that they carry: a tape of those, not of the block."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 5, "E": 12, "K": 3}, {"T": 3, "E": 40, "K": 6}]


@triton.jit
def greatest_kernel(z_ptr, g_ptr, w_ptr, E, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * E + lanes, mask=lanes < E, other=-1e30).to(tl.float32)
    left = z
    for j in range(K):
        place = tl.argmax(left, axis=0)
        tl.store(w_ptr + row * K + j, VALUE)
        left = NEXT


@autodiff(inputs_require_grad=(0, 1))
def greatest(z, g, k):
    T, E = z.shape
    w = torch.empty((T, k), device=z.device, dtype=z.dtype)
    greatest_kernel[(T,)](z.contiguous(), g, w, E, k, BLOCK=triton.next_power_of_2(E))
    return w


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["T"], dims["E"], device=device, dtype=dtype)
    return z, torch.rand(dims["K"], device=device, dtype=dtype) + 0.5, dims["K"]
"""
DIMS = [{"T": 5, "E": 12, "K": 3}, {"T": 3, "E": 40, "K": 6}, {"T": 2, "E": 7, "K": 1}]
WITHOUT = "tl.where(lanes == place, -1e30, left)"
SCALED = "left * tl.load(g_ptr + j)"
A_SQUARE = "tl.load(g_ptr + j) * tl.exp(tl.max(left, axis=0) * tl.max(left, axis=0) * 0.1)"
A_BLOCK = "tl.load(g_ptr + j) * tl.sum(tl.where(lanes == place, tl.sigmoid(left) * left, 0.0), axis=0)"
MANY = "tl.load(g_ptr + j) * " + " * ".join(
    f"tl.exp(tl.max(left * {0.1 * i + 0.1:.1f}, axis=0))" for i in range(5)
)


@pytest.mark.parametrize(
    ("value", "following", "taped", "bytes_of_a_step"),
    [
        (A_SQUARE, WITHOUT, ["tape_place", "tape_left_max"], 8),
        (A_BLOCK, WITHOUT, ["tape_left"], 4 * 16),
        (MANY, WITHOUT, ["tape_left"], 4 * 16),
        (A_SQUARE, SCALED, ["tape_left"], 4 * 16),
    ],
    ids=["numbers", "the block too", "too many numbers", "a sum of the block and its adjoint"],
)
def test_tape__holds_the_numbers_where_they_are_all_that_is_needed(
    tmp_path: Path, value: str, following: str, taped: list[str], bytes_of_a_step: int
) -> None:
    file = tmp_path / "f.py"
    file.write_text(SOURCE.replace("VALUE", value).replace("NEXT", following))
    result = draft(file, DIMS[0])
    for name in taped:
        assert f"tl.store({name} + " in result["backward"]
    assert result["report"]["tape_bytes"] == DIMS[0]["T"] * DIMS[0]["K"] * bytes_of_a_step
    assert_right(file, result, [(dims, "normal") for dims in DIMS])

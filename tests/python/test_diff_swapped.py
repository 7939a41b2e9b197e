"""Lanes that read their neighbours, as interleaved rotary embeddings do: one write a pair, without atomics,
where the mask lets both lanes of a pair through or neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 3, "R": 5}]


@triton.jit
def turn_kernel(x, c, y, stride, N, R, BN: tl.constexpr, BD: tl.constexpr):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    lanes = tl.arange(0, BD)
    other = lanes + (lanes + 1) % 2 * 2 - 1
    mask = (rows < N)[:, None] & (lanes // 2 < R)[None, :]
    here = tl.load(x + rows[:, None] * stride + lanes[None, :], mask=mask, other=0.0)
    there = tl.load(x + rows[:, None] * stride + other[None, :], mask=mask, other=0.0)
    scale = tl.load(c + lanes, mask=lanes < 2 * R, other=0.0)
    value = here * here + there * scale[None, :]
    tl.store(y + rows[:, None] * stride + lanes[None, :], value, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def turn(x, c):
    N, R = x.shape[0], x.shape[1] // 2
    y = torch.zeros_like(x)
    turn_kernel[(triton.cdiv(N, 2),)](x, c, y, x.stride(0), N, R, BN=2, BD=triton.next_power_of_2(2 * R))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    width = 2 * dims["R"] + 1
    return tuple(torch.randn(*shape, device=device, dtype=dtype) for shape in ((dims["N"], width), (width,)))
"""
SIZES = [({"N": n, "R": r}, "normal") for n, r in ((3, 5), (4, 1), (1, 8), (7, 3))]
TURNED = {
    "arithmetic": ("", ""),
    "exclusive or": ("lanes + (lanes + 1) % 2 * 2 - 1", "lanes ^ 1"),
}
NOT_TURNED = {
    "half a pair is masked": ("(lanes // 2 < R)", "(lanes < 2 * R - 1)"),
    "other neighbours": ("lanes + (lanes + 1) % 2 * 2 - 1", "lanes + (lanes + 2) % 4 // 2 * 4 - 2"),
    "lanes of the address apart": ("+ other[None, :]", "+ other[None, :] + lanes[None, :] - lanes[None, :] // 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TURNED))
def test_neighbours__are_stored_with_the_lanes_themselves(name: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace(*TURNED[name]) if TURNED[name][0] else SOURCE)
    result = draft(file, {"N": 3, "R": 5})
    assert "tl.split(" in result["backward"] and "_after" not in result["backward"]
    assert result["report"]["atomics"] == 0
    assert_right(file, result, SIZES)


@pytest.mark.parametrize("name", sorted(NOT_TURNED))
def test_what_is_no_pair__is_written_as_before(name: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace(*NOT_TURNED[name]))
    result = draft(file, {"N": 3, "R": 5})
    assert "tl.split(" not in result["backward"]
    if name == "half a pair is masked":
        assert_right(file, result, SIZES)

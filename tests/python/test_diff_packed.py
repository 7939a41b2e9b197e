"""Rows of packed sequences, which kernels find in data: stored where the host finds them apart, and refused
where it does not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from diff_support import assert_right, draft, pair_text

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 19, "D": 8}]


@triton.jit
def scale_kernel(x, y, cu, parts, T, D: tl.constexpr, BT: tl.constexpr, VARLEN: tl.constexpr):
    i_t, i_b = tl.program_id(0), tl.program_id(1)
    if VARLEN:
        i_n, i_t = tl.load(parts + 2 * i_t).to(tl.int32), tl.load(parts + 2 * i_t + 1).to(tl.int32)
        bos, eos = tl.load(cu + i_n).to(tl.int32), tl.load(cu + i_n + 1).to(tl.int32)
        T = eos - bos
    else:
        bos = i_b * T
    rows = i_t * BT + tl.arange(0, BT)
    at = (bos + rows)[:, None] * D + tl.arange(0, D)[None, :]
    mask = (rows < T)[:, None]
    value = tl.load(x + at, mask=mask, other=0.0)
    tl.store(y + at, value * value, mask=mask)


@autodiff(inputs_require_grad=(0,))
def scale(x, cu=None, parts=None):
    y = torch.zeros_like(x)
    B, T, D = x.shape
    grid = (triton.cdiv(T, 4) if parts is None else len(parts), B)
    scale_kernel[grid](x, y, cu, parts, T, D=D, BT=4, VARLEN=cu is not None)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    if T % 2 == 0:
        return (torch.randn(2, T, dims["D"], device=device, dtype=dtype),)
    cuts = [0, T // 3, T // 3, T]
    parts = [(n, t) for n in range(3) for t in range(-(-(cuts[n + 1] - cuts[n]) // 4))]
    tables = (torch.tensor(v, device=device, dtype=torch.int64) for v in (cuts, parts))
    return torch.randn(1, T, dims["D"], device=device, dtype=dtype), *tables
"""
CASES = [({"T": t, "D": 8}, "normal") for t in (19, 6, 1, 31, 20)]


def load(file: Path, backward: str, tmp_path: Path) -> ModuleType:
    pair = tmp_path / "packed_pair.py"
    pair.write_text(pair_text(file.read_text(), backward))
    spec = importlib.util.spec_from_file_location("packed_pair", pair)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["packed_pair"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("traced", [19, 6])
def test_packed_rows__are_stored__whichever_kind_of_call_is_traced(
    traced: int, write: Callable[[str], Path]
) -> None:
    file = write(SOURCE)
    result = draft(file, {"T": traced, "D": 8})
    assert "tl.atomic_add" not in result["backward"]
    assert result["backward"].count("sequences_apart(ordered(cu), distinct(parts, 2, grid[0]))") >= 1
    assert_right(file, result, CASES)


BAD = {
    "out of order": ([0, 9, 4, 19], [(0, 0), (1, 0), (2, 0)], 1, "in order"),
    "a part twice": ([0, 4, 19], [(0, 0), (0, 0)], 1, "meet"),
    "a part below zero": ([0, 4, 19], [(0, 0), (1, -1)], 1, "meet"),
    "a batch of two": ([0, 4, 19], [(0, 0), (1, 0)], 2, "same rows"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_packed_rows_that_meet__are_refused_before_the_launch(
    name: str, write: Callable[[str], Path], tmp_path: Path
) -> None:
    cuts, parts, batch, message = BAD[name]
    file = write(SOURCE)
    module = load(file, draft(file, {"T": 19, "D": 8})["backward"], tmp_path)
    x = torch.randn(batch, 19, 8, requires_grad=True)
    y = module.scale_autograd(x, torch.tensor(cuts), torch.tensor(parts))
    with pytest.raises(ValueError, match=message):
        y.sum().backward()


NOT_BOUNDED = {
    "by_the_end": ("(rows < T)[:, None]", "(rows < T + 1)[:, None]"),
    "by_the_next": ("i_n + 1).to", "i_n + 2).to"),
    "from_below": ("rows = i_t * BT", "rows = -i_t * BT"),
}


@pytest.mark.parametrize("name", sorted(NOT_BOUNDED))
def test_rows_that_nothing_keeps_in_their_sequence__are_added_atomically(
    name: str, write: Callable[[str], Path]
) -> None:
    file = write(SOURCE.replace(*NOT_BOUNDED[name]))
    assert draft(file, {"T": 19, "D": 8})["report"]["atomics"] == 1

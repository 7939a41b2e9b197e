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
from kernel_agent.errors import Unusable

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


SHARED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 19, "V": 24}]


@triton.jit
def rows_kernel(x, w, y, cu, parts, V, W: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    i_p, i_v = tl.program_id(0), tl.program_id(1)
    i_n, i_t = tl.load(parts + 2 * i_p), tl.load(parts + 2 * i_p + 1)
    bos, eos = tl.load(cu + i_n), tl.load(cu + i_n + 1)
    rows = i_t * BT + tl.arange(0, BT)
    inner = tl.arange(0, W)
    cols = i_v * BV + tl.arange(0, BV)
    mask = rows < eos - bos
    value = tl.load(x + (bos + rows)[:, None] * W + inner[None, :], mask=mask[:, None], other=0.0)
    weight = tl.load(w + inner[:, None] * V + cols[None, :], mask=(cols < V)[None, :], other=0.0)
    at = (bos + rows)[:, None] * V + cols[None, :]
    tl.store(y + at, tl.dot(value * value, weight), mask=mask[:, None] & (cols < V)[None, :])


@autodiff(inputs_require_grad=(0, 1))
def rows(x, w, cu, parts):
    T, W = x.shape
    V = w.shape[1]
    y = torch.zeros(T, V, device=x.device, dtype=x.dtype)
    grid = (len(parts), triton.cdiv(V, 16))
    rows_kernel[grid](x, w, y, cu, parts, V, W=W, BT=16, BV=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    T, V = dims["T"], dims["V"]
    cuts = [0, T // 3, T // 3, T]
    parts = [(n, t) for n in (2, 0, 1) for t in range(-(-(cuts[n + 1] - cuts[n]) // 16))]
    x, w = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((T, 16), (16, V)))
    return x, w, *(torch.tensor(v, device=device, dtype=torch.int64) for v in (cuts, parts))
"""


def test_packed_rows_that_several_programs_read__have_an_owner(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write(SHARED)
    result = draft(file, {"T": 19, "V": 24})
    assert "tl.atomic_add" not in result["backward"]
    assert_right(file, result, [({"T": t, "V": v}, "normal") for t, v in ((19, 24), (60, 40), (2, 5))])
    module = load(file, result["backward"], tmp_path)
    x, w = torch.randn(19, 16, requires_grad=True), torch.randn(16, 24)
    y = module.rows_autograd(x, w, torch.tensor([0, 9, 19]), torch.tensor([[0, 0], [0, 0]]))
    with pytest.raises(ValueError, match="meet"):
        y.sum().backward()


EARLY = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 19}]


@triton.jit
def early_kernel(x, y, cu, D: tl.constexpr):
    i_n, i_t, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bos, eos = tl.load(cu + i_n), tl.load(cu + i_n + 1)
    if i_t >= eos - bos:
        return
    value = tl.load(x + (bos + i_t) * D + tl.arange(0, D))
    tl.store(y + (bos + i_t) * 2 * D + i_v * D + tl.arange(0, D), value * value * (i_v + 1))


@autodiff(inputs_require_grad=(0,))
def early(x, cu):
    T, D = x.shape
    y = torch.zeros(T, 2 * D, device=x.device, dtype=x.dtype)
    early_kernel[(len(cu) - 1, T, 2)](x, y, cu, D=D)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    cu = torch.tensor([0, T // 3, T // 2, T], device=device, dtype=torch.int64)
    return torch.randn(T, 8, device=device, dtype=dtype), cu
"""


def test_rows_that_only_a_branch_keeps_in_their_sequence__are_not_stored_by_an_owner(
    write: Callable[[str], Path],
) -> None:
    file = write(EARLY)
    result = draft(file, {"T": 19})
    assert_right(file, result, [({"T": t}, "normal") for t in (19, 7, 30)])


LENGTHS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 40}]


@triton.jit
def mix_kernel(q, k, y, cu, BT: tl.constexpr, BS: tl.constexpr, D: tl.constexpr):
    i_t, i_n = tl.program_id(0), tl.program_id(1)
    bos, eos = tl.load(cu + i_n), tl.load(cu + i_n + 1)
    n = eos - bos
    if i_t * BT >= n:
        return
    rows = i_t * BT + tl.arange(0, BT)
    lanes = tl.arange(0, D)
    at = (bos + rows)[:, None] * D + lanes[None, :]
    mask = (rows < n)[:, None]
    b_q = tl.load(q + at, mask=mask, other=0.0)
    total = tl.zeros([BT], dtype=tl.float32)
    for start in range(0, n, BS):
        cols = start + tl.arange(0, BS)
        b_k = tl.load(k + (bos + cols)[:, None] * D + lanes[None, :], mask=(cols < n)[:, None], other=0.0)
        s = tl.dot(b_q, tl.trans(b_k))
        total += tl.sum(s * s, 1)
    total = tl.sqrt(total + 1.0)
    acc = tl.zeros([BT, D], dtype=tl.float32)
    for start in range(0, n, BS):
        cols = start + tl.arange(0, BS)
        b_k = tl.load(k + (bos + cols)[:, None] * D + lanes[None, :], mask=(cols < n)[:, None], other=0.0)
        s = tl.dot(b_q, tl.trans(b_k)) / total[:, None]
        acc += tl.dot(s, b_k)
    tl.store(y + at, acc, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def mix(q, k, cu):
    y = torch.zeros_like(q)
    longest = int((cu[1:] - cu[:-1]).max())
    mix_kernel[(triton.cdiv(longest, 16), len(cu) - 1)](q, k, y, cu, BT=16, BS=16, D=q.shape[1])
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    cu = torch.tensor([0, T // 3, T // 3, T], device=device, dtype=torch.int64)
    return *(torch.randn(T, 16, device=device, dtype=dtype) for _ in range(2)), cu
"""


def test_a_loop_over_a_packed_sequence__has_owners_for_as_many_blocks_as_the_longest_needs(
    write: Callable[[str], Path],
) -> None:
    file = write(LENGTHS)
    result = draft(file, {"T": 40})
    assert "longest(grid" in result["backward"] and "spill_" in result["backward"]
    assert_right(file, result, [({"T": t}, "normal") for t in (40, 7, 61)])


HEADS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 19}]


@triton.jit
def heads_kernel(x, y, cu, parts, H: tl.constexpr, BT: tl.constexpr):
    i_p, i_h = tl.program_id(0), tl.program_id(1) % H
    i_n, i_t = tl.load(parts + 2 * i_p), tl.load(parts + 2 * i_p + 1)
    bos, eos = tl.load(cu + i_n), tl.load(cu + i_n + 1)
    T = eos - bos
    rows = i_t * BT + tl.arange(0, BT)
    at = bos * H + i_h * T + rows
    value = tl.load(x + at, mask=rows < T, other=0.0)
    tl.store(y + at, value * tl.cumsum(value, axis=0), mask=rows < T)


@autodiff(inputs_require_grad=(0,))
def heads(x, cu, parts, H=3):
    y = torch.zeros_like(x)
    heads_kernel[(len(parts), H)](x, y, cu, parts, H=H, BT=8)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    cuts = [0, T // 3, T // 3, T]
    parts = [(n, t) for n in (2, 0, 1) for t in range(-(-(cuts[n + 1] - cuts[n]) // 8))]
    tables = (torch.tensor(v, device=device, dtype=torch.int64) for v in (cuts, parts))
    return torch.randn(3 * T, device=device, dtype=dtype), *tables
"""
OTHER_HEADS = {
    "stored": ("", "", 0),
    "a head more than the sequence has room for": ("bos * H", "bos * (H - 1)", 1),
    "heads that lie one row closer": ("i_h * T", "i_h * (T - 1)", 1),
    "rows that each sequence moves back": ("bos * H + i_h * T + rows", "bos + rows - i_n", 1),
    "rows of the sequence after": ("i_n + 1)", "i_n + 2)", 1),
    "rows beyond the head": ("mask=rows < T,", "mask=rows < T + 1,", 1),
}


@pytest.mark.parametrize("name", sorted(OTHER_HEADS))
def test_packed_rows_by_heads__are_stored_where_no_head_reaches_the_next(
    name: str, write: Callable[[str], Path]
) -> None:
    old, new, kept = OTHER_HEADS[name]
    file = write(HEADS.replace(old, new) if old else HEADS)
    if kept:
        try:
            result = draft(file, {"T": 19})
        except Unusable:
            return  # its stores meet, too
        assert result["report"]["atomics"] == kept
        return
    result = draft(file, {"T": 19})
    assert "tl.atomic_add" not in result["backward"]
    assert_right(file, result, [({"T": t}, "normal") for t in (19, 2, 40)])

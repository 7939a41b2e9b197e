"""Loops over the blocks of a row: the backward has the whole row in one block where nothing hangs on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent.differentiate.schedule import whole_rows

SOURCE = '''import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 21}, {"M": 512, "N": 4096}]


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Rows by their root mean square, times w."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        total += x * x
    scale = 1 / tl.sqrt(tl.sum(total, axis=0) / N + 0.1)
    for start in range(0, N, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
        w = tl.load(w_ptr + cols, mask=cols < N, other=0.0)
        tl.store(y_ptr + row * N + cols, x * scale * w, mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
    x = x.contiguous()
    y = torch.empty_like(x)
    M, N = x.shape
    kernel[(M,)](x, w, y, N, BLOCK=8)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.rand(dims["M"], dims["N"], device=device, dtype=dtype) + 0.5
    return x, torch.randn(dims["N"], device=device, dtype=dtype)
'''
SIZES = [
    ({"M": m, "N": n}, layout)
    for m, n in [(5, 21), (3, 1), (2, 64), (4, 70)]
    for layout in ("normal", "expanded")
]


def made(folder: Path, *edits: tuple[str, str]) -> Path:
    text = SOURCE
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    file = folder / "rows.py"
    file.write_text(text)
    return file


def test_row__is_read_once_by_a_few_programs_that_keep_the_sums(tmp_path: Path) -> None:
    file = made(tmp_path)
    result = draft(file, {"M": 5, "N": 21})
    backward = result["backward"]
    assert "BLOCK = triton.next_power_of_2(N)" in backward
    ours, saving = backward.split("@triton.jit")[1:3]
    code = [line.split("#")[0] for line in ours.splitlines()]
    assert sum("tl.load(x_ptr" in line for line in code) == 1 and "range(0, N" not in ours
    assert "_saving(" in saving and "saved_scale" in ours, "the forward has what took a sum over the row"
    assert backward.count("@triton.jit") == 3, "beside them the sum of private rows"
    assert_right(file, result, SIZES)


def test_rows_of_both_lengths__have_kernels_of_their_own(tmp_path: Path) -> None:
    file = made(tmp_path, ('"N": 4096', '"N": 16384'))
    result = draft(file, {"M": 5, "N": 21})
    backward = result["backward"]
    assert "if N <= 8192:" in backward and "kernel_bwd_row[" in backward and "kernel_bwd[" in backward
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in [(5, 21), (2, 8192), (1, 8193)]])


def test_values_of_a_row__are_as_many_as_registers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_rows, "REGISTERS", 4 * 2048)  # x, w, the upstream, and the sum of d_w
    backward = draft(made(tmp_path, ('"N": 4096', '"N": 16384')), {"M": 5, "N": 21})["backward"]
    assert "if N <= 2048:" in backward


def test_carry_that_adds_up_blocks__is_one_sum(tmp_path: Path) -> None:
    file = made(
        tmp_path,
        ("total = tl.zeros([BLOCK], dtype=tl.float32)", "total = 0.0"),
        ("total += x * x", "total += tl.sum(x * x, axis=0)"),
        ("tl.sum(total, axis=0) / N", "total / N"),
    )
    result = draft(file, {"M": 5, "N": 21})
    assert "BLOCK = triton.next_power_of_2(N)" in result["backward"]
    assert_right(file, result, SIZES)


@pytest.mark.parametrize(
    "edits",
    {
        "a size that no name has": [
            ('torch.rand(dims["M"], dims["N"]', 'torch.rand(dims["M"], 2 * dims["N"]'),
            ('torch.randn(dims["N"]', 'torch.randn(2 * dims["N"]'),
        ],
        "a sum that is not zero beyond the row": [("other=0.0)\n        total", "other=1.0)\n        total")],
        "zero times what may be no number": [("total += x * x", "total += x * tl.log(x)")],
        "a number that the block is in": [
            ("tl.sum(total, axis=0) / N", "tl.sum(total, axis=0) / (N + BLOCK)")
        ],
        "a maximum": [
            ("total += x * x", "total = tl.maximum(total, x)"),
            ("tl.sum(total, axis=0) / N", "tl.max(total, axis=0)"),
        ],
        "lanes that are more than columns": [("x * scale * w", "x * scale * w + 0.01 * lanes")],
        "a block of ones that is summed": [
            ("/ N + 0.1)", "/ N + 0.1 * tl.sum(tl.full([BLOCK], 0.125, tl.float32), axis=0))")
        ],
        "a cumulated sum": [("x * scale * w", "tl.cumsum(x, axis=0) * scale * w")],
    }.values(),
    ids=lambda edits: edits[0][1][:30],
)
def test_kernel_that_hangs_on_its_block__keeps_it(tmp_path: Path, edits: list[tuple[str, str]]) -> None:
    file = made(tmp_path, *edits)
    result = draft(file, {"M": 5, "N": 21})
    assert "next_power_of_2" not in result["backward"]


def test_row_longer_than_a_block_can_be__is_refused_by_name(tmp_path: Path) -> None:
    backward = draft(made(tmp_path), {"M": 5, "N": 21})["backward"]
    assert 'raise ValueError(f"a row of {N} elements is more than a block of 1048576")' in backward

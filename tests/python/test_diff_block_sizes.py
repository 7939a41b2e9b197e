"""Sizes of blocks that a kernel computes from others: known when it is compiled, in the backward too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

OWN_SIZES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20}]


@triton.jit
def centre_kernel(x, y, M, N: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    ROWS: tl.constexpr = ROWS_OF
    COLS: tl.constexpr = COLS_OF
    rows, cols = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    at = rows[:, None] * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    v = tl.load(x + at, mask=mask, other=0.0)
    mean = tl.broadcast_to(tl.sum(v, axis=1)[:, None] / N, (ROWS, COLS))
    spread = tl.zeros((ROWS, COLS), tl.float32) + (v - mean) * tl.exp(mean)
    tl.store(y + at, spread * (ROWS + COLS), mask=mask)


@autodiff(inputs_require_grad=(0,))
def centre(x):
    M, N = x.shape
    y = torch.empty_like(x)
    rows = 8 if N < 20 else 16
    centre_kernel[(triton.cdiv(M, 4 if N < 20 else 8),)](x, y, M, N, BLOCK=rows, NARROW=N < 20)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""


SIZES = {
    "a part, and a power of two": ["BLOCK // 2", "triton.next_power_of_2(N)"],
    "one from the other": ["BLOCK // 4 * 2", "128 // ROWS"],
    "chosen by a flag": ["BLOCK // 2", "ROWS * 8 if NARROW else BLOCK * 2"],
}


@pytest.mark.parametrize("rows, cols", SIZES.values(), ids=SIZES)
def test_size_that_the_kernel_computes__is_known_when_the_backward_is_compiled(
    rows: str, cols: str, write: Callable[[str], Path]
) -> None:
    file = write(OWN_SIZES.replace("ROWS_OF", rows).replace("COLS_OF", cols))
    result = draft(file, {"M": 5, "N": 20})
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (9, 16), (8, 7))])

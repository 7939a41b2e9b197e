"""Loops over any range: from an offset, downwards, in steps, with a state that is carried on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors

DECAY = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"T": 9, "C": 20}}]


@triton.jit
def decay_kernel(x_ptr, y_ptr, T, W, C, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    h = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range({range}):
        h = 0.5 * h + tl.load(x_ptr + t * C + c, mask=mask, other=0.0)
        tl.store(y_ptr + t * C + c, h * h, mask=mask)


@autodiff(inputs_require_grad=(0,))
def decay(x):
    x = x.contiguous()
    T, C = x.shape
    y = torch.zeros_like(x)
    decay_kernel[(triton.cdiv(C, 16),)](x, y, T, T // 2, C, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["T"], dims["C"], device=device, dtype=dtype),)
"""

RANGES = {
    "a window at the end": "T - W, T",
    "down to the first": "T - 1, -1, -1",
    "down to an offset": "T - 1, W - 1, -1",
    "between numbers": "7, -1, -1",
    "every second, upwards": "1, T, 2",
    "every second, downwards": "T - 1, -1, -2",
    "every third, down to an offset": "T - 1, T - W, -3",
    "nothing at all": "2, T - T, 1",
}


@pytest.mark.parametrize("name", RANGES)
def test_carried_state__over_any_range__is_differentiated(name: str, write: Callable[[str], Path]) -> None:
    file = write(DECAY.format(range=RANGES[name]))
    result = draft(file, {"T": 9, "C": 20})
    sizes = ((9, 20), (8, 33)) if "numbers" in name else ((9, 20), (8, 33), (14, 16), (3, 5))
    assert_right(file, result, [({"T": t, "C": c}, "normal") for t, c in sizes])
    assert "atomic_add" not in result["backward"]


TWO_LOOPS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


@triton.jit
def scaled_kernel(x_ptr, y_ptr, M, N, ROWS: tl.constexpr = 2, BLOCK: tl.constexpr = 16):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        mask = rows < M and cols < N
        x_ptrs = x_ptr + rows * N + cols
        total += tl.sum(tl.load(x_ptrs, mask=mask, other=0.0), axis=1)
    for start in range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        mask = rows < M and cols < N
        x_ptrs = x_ptr + rows * N + cols
        x = tl.load(x_ptrs, mask=mask, other=0.0)
        tl.store(y_ptr + rows * N + cols, x * total[:, None], mask=mask)


@autodiff(inputs_require_grad=(0,))
def scaled(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    M, N = x.shape
    scaled_kernel[lambda meta: (triton.cdiv(M, meta["ROWS"]),)](x, y, M, N)
    return y
"""


def test_names_of_two_loops__are_each_loop_s_own__and_the_grid_asks_for_a_default(
    write: Callable[[str], Path],
) -> None:
    file = write(TWO_LOOPS)
    result = draft(file, {"M": 5, "N": 20})
    assert "grid = grid(dict(x_ptr=x_ptr, y_ptr=y_ptr, M=M, N=N, ROWS=2))" in result["backward"]
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (4, 33), (1, 1))])


def test_name_of_an_earlier_loop_that_a_later_one_reads_first__is_refused(
    write: Callable[[str], Path],
) -> None:
    text = TWO_LOOPS.replace("        x_ptrs = x_ptr + rows * N + cols\n        x = tl", "        x = tl")
    with pytest.raises(errors.Unusable) as caught:
        draft(write(text), {"M": 5, "N": 20})
    assert "`x_ptrs` is assigned only inside a loop and used after it" in str(caught.value.extra["refusals"])  # type: ignore[attr-defined]

"""Loops over any range: from an offset, downwards, in steps, with a state that is carried on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

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

"""A launch of no programs has a backward too, where the length of a tape is the longest of its programs or is
split among them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def waves(x_ptr, w_ptr, y_ptr, lens_ptr, N, T, D, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    LOOP
        state = tl.sin(state * w + x)
    tl.store(y_ptr + first * D + cols, state * w, mask=mask)


@autodiff(inputs_require_grad=WRT)
def op(x, w, lens):
    N, T, D = x.shape
    y = x.new_zeros(min(N, 3), D)
    waves[(min(N, 3),)](x, w, y, lens, N, T, D, BLOCK=triton.next_power_of_2(D))
    return y


SWEEP = [{"N": 3, "T": 6, "D": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["T"], dims["D"], device=device, dtype=dtype)
    lens = torch.randint(0, dims["T"] + 1, (dims["N"],), dtype=torch.int32, device=device)
    return x, torch.randn(dims["D"], device=device, dtype=dtype), lens
"""
LOOPS = {
    "longest": "for t in range(tl.load(lens_ptr + first)):\n"
    "        x = tl.load(x_ptr + (first * T + t) * D + cols, mask=mask, other=0.0)",
    "split": "for n in range(first, N, tl.num_programs(0)):\n"
    "        x = tl.load(x_ptr + n * T * D + cols, mask=mask, other=0.0)",
}
CASES = [
    ({"N": 5, "T": 6, "D": 5}, "normal"),
    ({"N": 0, "T": 6, "D": 5}, "normal"),
    ({"N": 1, "T": 1, "D": 4}, "normal"),
]


@pytest.mark.parametrize("wrt", ["(0,)", "(0, 1)"])
@pytest.mark.parametrize("loop", LOOPS)
def test_tape_of_no_programs__is_not_asked_for(loop: str, wrt: str, write: Callable[..., Path]) -> None:
    file = write(SOURCE.replace("LOOP", LOOPS[loop]).replace("WRT", wrt))
    result = draft(file, {"N": 5, "T": 6, "D": 5})
    assert "tape_steps = " in result["backward"] and result["report"]["tape_bytes"]
    assert_right(file, result, CASES)

"""A running maximum that one branch of a kernel keeps, in programs that do not leave early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diff_support import assert_right, draft

FORWARD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 9}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


@triton.jit
def kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    if row > 3:
        return
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    if row % 2 == 0:
        value = x * x
    else:
        top, total = x * 0.0 - float("inf"), x * 0.0
        for step in range(3):
            s = x * (step + 1)
            new = tl.maximum(top, s)
            total = total * tl.exp(top - new) + tl.exp(s - new)
            top = new
        value = top + tl.log(total)
    tl.store(y_ptr + row * N + cols, value, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def stub(x):
    y = torch.zeros_like(x)
    kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y
"""


def test_running_maximum_of_one_branch__cancels_there(write: Callable[[str], Path]) -> None:
    file = write(FORWARD)
    result = draft(file, {"M": 5, "N": 9})
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 9), (2, 16), (1, 1))])

"""Lanes that a mask switches off read `other`: infinite ones leave no trace in sums over lanes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 21}]


@triton.jit
def soft_kernel(x_ptr, t_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=-float("inf"))
    t = tl.load(t_ptr + row)
    x = SCALED
    top = tl.max(x, axis=0)
    tl.store(y_ptr + row, top + tl.log(tl.sum(tl.exp(x - top), axis=0)))


@autodiff(inputs_require_grad=(0, 1))
def soft(x, t):
    y = torch.empty_like(t)
    soft_kernel[(x.shape[0],)](x, t, y, x.shape[1], BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, torch.rand(dims["M"], device=device, dtype=dtype) + 0.5
"""


def test_quotient_of_lanes_that_have_no_number__has_a_gradient(write: Callable[[str], Path]) -> None:
    text = SOURCE.replace('other=-float("inf")', "other=0.0").replace("SCALED", "tl.rsqrt(x * x) / t")
    text = text.replace("top = tl.max(x, axis=0)", "x = tl.where(mask, x, 0.0)\n    top = tl.max(x, axis=0)")
    file = write(text)
    dims = {"M": 3, "N": 21}
    assert_right(file, draft(file, dims), [(dims, "normal")], 1e-5)


@pytest.mark.parametrize("scaled", ["x / t", "x * t", "x / tl.broadcast_to(t, [BLOCK])", "x / tl.exp(t)"])
def test_scale_of_infinite_lanes__has_a_gradient(scaled: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("SCALED", scaled))
    dims = {"M": 3, "N": 21}
    assert_right(file, draft(file, dims), [(dims, "normal")], 1e-5)

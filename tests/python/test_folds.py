"""Reductions and scans with a kernel's own function: what combining one element after another gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import interpret, launches

launches.set_mode("interpret")


@triton.jit
def merge(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    part = tl.where(n == 0.0, 0.0, n_b / tl.maximum(n, 1.0))
    gap = mean_b - mean_a
    return mean_a + gap * part, m2_a + m2_b + gap * gap * n_a * part, n


@triton.jit
def affine(a, x, b, y):
    return a * b, b * x + y


@triton.jit
def first_larger(value_a, at_a, value_b, at_b):
    if value_a >= value_b:
        value, at = value_a, at_a
    else:
        value, at = value_b, at_b
    return value, at


@triton.jit
def fold_kernel(x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, LENGTH: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    mean, m2, n = tl.reduce((x, x * 0, x * 0 + 1), AXIS, merge, keep_dims=KEEP)
    out = tl.reshape(mean * n + m2, [LENGTH])
    tl.store(y_ptr + tl.arange(0, LENGTH), out)


@triton.jit
def last_state_kernel(x_ptr, y_ptr, AXIS: tl.constexpr, LENGTH: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    _, h = tl.reduce((x * 0 + 0.5, x), AXIS, affine)
    tl.store(y_ptr + tl.arange(0, LENGTH), h)


@triton.jit
def scan_kernel(x_ptr, y_ptr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    _, h = tl.associative_scan((x * 0 + 0.5, x), AXIS, affine, reverse=REVERSE)
    tl.store(y_ptr + at, h)


@triton.jit
def deciding_kernel(x_ptr, y_ptr):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    value, where = tl.reduce((x, at), 1, first_larger)
    rows = tl.arange(0, 8)
    tl.store(y_ptr + rows, value)
    tl.store(y_ptr + 8 + rows, where.to(tl.float32))


def run(kernel: Any, length: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    x, y = torch.randn(8, 16), torch.full((length,), float("nan"))
    interpret.run(kernel, (1,), dict(x_ptr=x, y_ptr=y, **options))
    return x, y


@pytest.mark.parametrize(("axis", "length"), [(0, 16), (1, 8)])
@pytest.mark.parametrize("keep", [False, True])
def test_reduce__of_several_tensors_along_an_axis(axis: int, length: int, keep: bool) -> None:
    x, y = run(fold_kernel, length, AXIS=axis, KEEP=keep, LENGTH=length)
    count = x.shape[axis]
    torch.testing.assert_close(y, x.sum(axis) + x.var(axis, correction=0) * count)


@pytest.mark.parametrize(("axis", "length"), [(0, 16), (1, 8)])
def test_reduce__keeps_the_order_of_the_axis(axis: int, length: int) -> None:
    x, y = run(last_state_kernel, length, AXIS=axis, LENGTH=length)
    expected = torch.zeros(length)
    for row in x.movedim(axis, 0):
        expected = 0.5 * expected + row
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan__of_several_tensors__has_the_order_of_the_axis(axis: int, reverse: bool) -> None:
    x, y = run(scan_kernel, 128, AXIS=axis, REVERSE=reverse)
    rows = x.movedim(axis, 0)
    expected, h = torch.empty_like(rows), torch.zeros_like(rows[0])
    for t in reversed(range(len(rows))) if reverse else range(len(rows)):
        h = expected[t] = 0.5 * h + rows[t]
    torch.testing.assert_close(y.view(8, 16), expected.movedim(0, axis))


def test_function_that_decides_on_elements__is_called_for_each() -> None:
    x, y = run(deciding_kernel, 16)
    value, where = x.max(1)
    assert torch.equal(y[:8], value) and torch.equal(y[8:], where + 16.0 * torch.arange(8))

"""A host function that chooses its kernel by size: each launch has a backward, or says that it has none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import assert_right, draft, pair_text
from kernel_agent import forward
from kernel_agent.differentiate import grad

CHOOSES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 20}, {"N": 300}]


@triton.jit
def short_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * x, mask=i < n)


@triton.jit
def long_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * x, mask=i < n)


def many(x, y):
    n = x.numel()
    long_kernel[(triton.cdiv(n, 64),)](x, y, n, BLOCK=64)
    return y


@autodiff(inputs_require_grad=(0,))
def square(x):
    if x.numel() > 1000:
        raise ValueError("at most 1000")
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n < 100:
        short_kernel[(triton.cdiv(n, 16),)](x, y, n, BLOCK=16)
        return y
    return many(x, y)


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""

SHORT, LONG = {"N": 20}, {"N": 300}


@pytest.mark.parametrize(("first", "others"), [(SHORT, [{"N": 2000}, LONG]), (LONG, [SHORT])])
def test_each_size__has_a_backward_where_one_of_it_is_traced(
    first: dict[str, int], others: list[dict[str, int]], write: Callable[[str], Path]
) -> None:
    file = write(CHOOSES)
    result = draft(file, first, case={"dims": first, "seed": 1, "others": others})
    assert "untraced" not in result["backward"]
    assert_right(file, result, [(SHORT, "normal"), (LONG, "normal"), ({"N": 33}, "normal")])


def test_grad_of_a_file__traces_the_sizes_of_its_sweep(write: Callable[[str], Path]) -> None:
    assert "untraced" not in grad(write(CHOOSES)).text
    assert "untraced" not in grad(write(CHOOSES), LONG).text


@pytest.mark.parametrize(("first", "fine", "other", "line"), [(SHORT, 20, 300, 25), (LONG, 300, 20, 36)])
def test_size_that_was_not_traced__raises_with_its_line(
    first: dict[str, int], fine: int, other: int, line: int, write: Callable[[str], Path]
) -> None:
    file = write(CHOOSES)
    result = draft(file, first, case={"dims": first, "seed": 1})
    assert [r["line"] for r in result["report"]["lines"] if r["proof"] == "untraced"] == [line]
    pair = write(pair_text(CHOOSES, result["backward"]))
    fwd = forward.load(pair)
    entry = getattr(fwd.module, fwd.entry_name)
    with fwd.active():
        x = torch.randn(fine, requires_grad=True)
        (found,) = torch.autograd.grad(entry(x).sum(), x)
        assert torch.allclose(found, 2 * x)
        with pytest.raises(NotImplementedError, match=f"line {line} launches"):
            entry(torch.randn(other, requires_grad=True))

"""What is one in the traced call and more in others, or has a name that generated code takes too: right, or
an error where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, errors
from kernel_agent.errors import Unusable

TWICE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 40, "J": 1}]


@triton.jit
def scale_kernel(x, w, y, N, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < N, other=0.0)
    weight = tl.load(w + tl.arange(0, B))
    tl.store(y + at, value * value * weight, mask=at < N)


@autodiff(inputs_require_grad=(0, 1))
def scale(x, w, J):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 16), J)](x, w, y, x.numel(), B=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x, w = (torch.randn(n, device=device, dtype=dtype) for n in (dims["N"], 16))
    return x, w, dims["J"]
"""


def test_programs_that_store_the_same_once_more__are_refused_before_the_launch(
    write: Callable[[str], Path],
) -> None:
    file = write(TWICE)
    result = draft(file, {"N": 40, "J": 1})
    assert_right(file, result, [({"N": n, "J": 1}, "normal") for n in (40, 7)])
    with pytest.raises(AssertionError, match="2 programs along axis 1, of 1"):
        errors(file, result["backward"], [({"N": 40, "J": 2}, "normal")])


OVERLAPPING = TWICE.replace("tl.program_id(0) * B +", "tl.program_id(0) * SHIFT +").replace(
    "N, B:", "N, SHIFT, B:"
)
OVERLAPPING = OVERLAPPING.replace("x.numel(), B=16)", "x.numel(), J, B=16)").replace("16), J)]", "16),)]")


@pytest.mark.parametrize("shift", [8, 16])
def test_programs_of_another_size_that_store_to_the_same__are_refused(
    shift: int, write: Callable[[str], Path]
) -> None:
    """One in the traced call; of several the address tells which it is, but not where blocks overlap."""
    file = write(OVERLAPPING)
    first, other = ({"N": n, "J": shift} for n in (16, 40))
    case = {"dims": first, "seed": 1, "others": [other]}
    if shift < 16:
        with pytest.raises(Unusable, match="stored to at one address by several programs"):
            draft(file, first, case=case)
    else:
        assert_right(file, draft(file, first, case=case), [(first, "normal"), (other, "normal")])


NOT_ASKED = [
    ("at = tl.program_id(0)", "at = (tl.program_id(0) + tl.program_id(1) * N // B)"),
    (", J)]", ", 1)]"),
]


@pytest.mark.parametrize("mended", NOT_ASKED)
def test_an_axis_that_is_stored_by_or_has_one_program_as_written__is_not_asked_for(
    mended: tuple[str, str], write: Callable[[str], Path]
) -> None:
    file = write(TWICE.replace(*mended))
    assert "at_most(grid, 1" not in draft(file, {"N": 40, "J": 1})["backward"]


NAMED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"K": 40}]


@triton.jit
def k(x, y, K, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + at, mask=at < K, other=0.0)
    tl.store(y + at, value * value, mask=at < K)


@autodiff(inputs_require_grad=(0,))
def square(x):
    K = x.numel()
    y = torch.empty_like(x)
    k[(triton.cdiv(K, 16),)](x, y, K, B=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["K"], device=device, dtype=dtype),)
"""


def test_a_function_is_not_hidden_by_a_variable_beside_the_launch(write: Callable[[str], Path]) -> None:
    file = write(NAMED)
    assert_right(file, draft(file, {"K": 40}), [({"K": 21}, "normal")])


FLAGGED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 3, "N": 20}]


@triton.jit
def walk_kernel(x, y, N, T, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    h = tl.zeros([B], dtype=tl.float32)
    up = at >= 0
    for t in range(0, T):
        v = tl.load(x + t * N + at, mask=at < N, other=0.0)
        h = tl.where(up, tl.sin(h * 2) + v * h * 0.5, v * v - h)
        up = (v > 0) ^ up
    tl.store(y + at, h, mask=at < N)


@autodiff(inputs_require_grad=(0,))
def walk(x):
    T, N = x.shape
    y = torch.empty(N, device=x.device, dtype=x.dtype)
    walk_kernel[(triton.cdiv(N, 16),)](x, y, N, T, B=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["T"], dims["N"], device=device, dtype=dtype),)
"""


def test_a_flag_that_a_loop_carries__has_a_tape(write: Callable[[str], Path]) -> None:
    file = write(FLAGGED)
    result = draft(file, {"T": 1, "N": 20})
    assert "dtype=torch.bool" in result["backward"]
    assert_right(file, result, [({"T": t, "N": 20}, "normal") for t in (1, 2, 9)])

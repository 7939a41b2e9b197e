"""A branch that no traced launch takes need not have an adjoint; a call that takes it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import assert_right, draft, pair_text
from kernel_agent import forward
from kernel_agent.differentiate import Refusal
from kernel_agent.errors import Unusable

MODES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"N": 50}}]


@triton.heuristics({{"HAS_SCALE": lambda args: args["scale_ptr"] is not None}})
@triton.jit
def mode_kernel(x_ptr, scale_ptr, y_ptr, n, HAS_SCALE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    if {test}:
        x = {untaken}
    else:
        x = x * x
    tl.store(y_ptr + i, x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def shaped(x, scale=None, mode="square"):
    x = x.contiguous()
    y = torch.empty_like(x)
    mode_kernel[(triton.cdiv(x.numel(), 16),)](x, scale, y, x.numel(), MODE=mode, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""

# What is refused as the kernel is read, and what has no adjoint.
READ = 'tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)'
REVERSED = "tl.sort(x)"
RAISED = "0\n        raise NotImplementedError"
TESTS = {
    'MODE == "other"': ({}, {"mode": "other"}),
    "HAS_SCALE": ({}, {"scale": torch.ones(50)}),
    "scale_ptr is not None": ({}, {"scale": torch.ones(50)}),
    'HAS_SCALE and MODE != "square"': ({"scale": torch.ones(50)}, {"scale": torch.ones(50), "mode": "other"}),
}


@pytest.mark.parametrize("untaken", [READ, REVERSED, RAISED])
@pytest.mark.parametrize("test", TESTS)
def test_branch_that_is_not_taken__is_left_out_and_refused_in_calls(
    test: str, untaken: str, write: Callable[[str], Path]
) -> None:
    fine, other = TESTS[test]
    source = MODES.format(test=test, untaken=untaken)
    file = write(source)
    result = draft(file, {"N": 50})
    assert [r["line"] for r in result["report"]["lines"] if r["proof"] == "untaken"] == [15]
    assert_right(file, result, [({"N": n}, "normal") for n in (50, 7)])
    pair = write(pair_text(source, result["backward"]))
    fwd = forward.load(pair)
    entry = getattr(fwd.module, fwd.entry_name)
    x = torch.randn(50, requires_grad=True)
    with fwd.active():
        (found,) = torch.autograd.grad(entry(x, **fine).sum(), x)
        assert torch.allclose(found, 2 * x)
        with pytest.raises(NotImplementedError, match=r"branch of line 15 .* has no backward"):
            entry(x, **other)


@pytest.mark.parametrize("untaken", [READ, REVERSED])
@pytest.mark.parametrize("test", ['MODE == "square"', "n < 1000", "tl.sum(x, 0) > 1e30"])
def test_branch_that_is_or_may_be_taken__is_refused(
    test: str, untaken: str, write: Callable[[str], Path]
) -> None:
    with pytest.raises((Refusal, Unusable)) as refused:
        draft(write(MODES.format(test=test, untaken=untaken)), {"N": 50})
    assert refused.value.line == 16


ELSEWHERE = MODES.replace("x = {untaken}", "{untaken}").replace(
    "    x = tl.load", "    p = x_ptr + i\n    x = tl.load"
)


@pytest.mark.parametrize(
    "untaken",
    [
        "if n > 9:\n            p = scale_ptr + i",
        "p = scale_ptr + i",
        "p = (x, x)",
    ],
)
def test_name_that_such_a_branch_gives_another_kind__is_used_without_it(
    untaken: str, write: Callable[[str], Path]
) -> None:
    """The branch is read well; what it leaves in a name is used below it."""
    source = ELSEWHERE.format(test="HAS_SCALE", untaken=untaken)
    used = "x * tl.load(p, mask=mask, other=0.0)"
    file = write(source.replace("tl.store(y_ptr + i, x,", f"tl.store(y_ptr + i, {used},"))
    result = draft(file, {"N": 50})
    assert [r["line"] for r in result["report"]["lines"] if r["proof"] == "untaken"] == [16]
    assert_right(file, result, [({"N": n}, "normal") for n in (50, 7)])


CHOSEN = """
    wide = {types} if WIDE else tl.float32
    total = tl.zeros((BLOCK,), wide)
    total += {value} if WIDE else x * x
    tl.store(y_ptr + i, total, mask=mask)
"""


@pytest.mark.parametrize("value", ["x", "tl.sort(x)", READ])
def test_side_of_a_conditional_expression_that_is_not_taken__is_left_out(
    value: str, write: Callable[[str], Path]
) -> None:
    """What it leaves would be of another kind: types of which each is a name."""
    source = MODES.replace("MODE: tl.constexpr", "WIDE: tl.constexpr")
    above, _, below = source.partition("    if {test}:")
    below = below.partition("mask=mask)\n")[2]
    text = (above + CHOSEN + below).replace("MODE=mode", "WIDE=x.dtype == torch.float64")
    file = write(text.format(types="tl.float64", value=value))
    result = draft(file, {"N": 50})
    assert_right(file, result, [({"N": n}, "normal") for n in (50, 7)])
    fwd = forward.load(write(pair_text(text.format(types="tl.float64", value="x"), result["backward"])))
    x = torch.randn(50, requires_grad=True, dtype=torch.float64)
    with fwd.active(), pytest.raises(NotImplementedError, match=r"branch of line 1[68] .* has no backward"):
        getattr(fwd.module, fwd.entry_name)(x)


ADDED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"S": [9, 5], "N": 40}]


@triton.jit
def add_to(at, value, mask):
    old = tl.load(at, mask=mask)
    tl.store(at, old + value, mask=mask)


@triton.jit
def part_kernel(
    x_ptr, y_ptr, start_ptr, length_ptr, n, BM: tl.constexpr, BN: tl.constexpr, ADDS: tl.constexpr
):
    part = tl.program_id(1)
    length = tl.load(length_ptr + part)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    at = (tl.load(start_ptr + part) + rows)[:, None] * n + tl.arange(0, BN)[None, :]
    mask = (rows < length)[:, None] * (tl.arange(0, BN) < n)[None, :]
    if length == 7:
        if not ADDS:
            tl.store(y_ptr + at, 0.0, mask=mask)
    else:
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        if ADDS:
            add_to(y_ptr + at, x * x, mask)
        else:
            tl.store(y_ptr + at, x * x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def parts(x, start, length, adds=False):
    y = torch.empty_like(x)
    part_kernel[(3, len(start))](x, y, start, length, x.shape[1], BM=4, BN=64, ADDS=adds)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    length = torch.tensor(dims["S"], device=device)
    x = torch.randn(sum(dims["S"]), dims["N"], device=device, dtype=dtype)
    return x, length.cumsum(0) - length, length
"""


def test_addition_in_place_that_no_launch_makes__is_left_out(write: Callable[[str], Path]) -> None:
    """Rows of data are stored, or added to what is there: of the second nobody could prove that one program
    has each row."""
    file = write(ADDED)
    dims = {"S": [9, 5], "N": 40}
    result = draft(file, dims)
    assert_right(file, result, [(dims, "normal"), ({"S": [3, 7, 12], "N": 33}, "normal")])
    assert "if ADDS:" in result["backward"] and "has no backward" in result["backward"]
    taken = write(ADDED.replace("adds=False", "adds=True"))
    with pytest.raises(Unusable, match="overwritten, but not by one program an element") as refused:
        draft(taken, dims)
    assert "tl.store(at, old" in ADDED.splitlines()[(refused.value.line or 0) - 1]

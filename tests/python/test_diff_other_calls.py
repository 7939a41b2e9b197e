"""Calls that differ from the traced one in what carries gradients: what is constant, what a buffer holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 1, "N": 20}]


@triton.jit
def square_kernel(x_ptr, y_ptr, first, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + first + at, mask=at < n, other=0.0)
    tl.store(y_ptr + first + at, x * x, mask=at < n)


@triton.jit
def added_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + at, mask=at < n, other=0.0)
    y += tl.sin(tl.load(x_ptr + at, mask=at < n, other=0.0))
    tl.store(y_ptr + at, y, mask=at < n)


def either(x, m):
    if m > 2:
        return x * 2
    return torch.ones_like(x)


def squared(s, grid, total):
    y = torch.empty_like(s)
    square_kernel[grid](s, y, 0, total, BLOCK=16)
    return y


@triton.jit
def maybe_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, tl.sin(x), mask=at < n)
    if z_ptr is not None:
        tl.store(z_ptr + at, tl.exp(x), mask=at < n // 2)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
    m, n = x.shape
    total = x.numel()
    grid = (triton.cdiv(total, 16),)
BODY
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
"""
BODIES = {
    "constant_in_the_traced_call": """
    s = x if m > 2 else torch.ones_like(x)
    y = torch.empty_like(x)
    square_kernel[grid](s, y, 0, total, BLOCK=16)
    y = y * w
""",
    "constant_in_one_branch": """
    s = torch.ones_like(x)
    if m > 2:
        s = x * w
    z, y = torch.empty_like(x), torch.empty_like(x)
    square_kernel[grid](s.contiguous(), z, 0, total, BLOCK=16)
    square_kernel[grid](z, y, 0, total, BLOCK=16)
    y = y * w
""",
    "constant_out_of_a_helper": """
    s = either(x, m)
    y = torch.empty_like(x)
    square_kernel[grid](s, y, 0, total, BLOCK=16)
    y = y * w
""",
    "constant_passed_to_a_helper": """
    s = either(x, m)
    y = squared(s, grid, total) * w
""",
    "added_to_what_is_constant": """
    y = x * 1.0 if m > 2 else torch.zeros_like(x)
    added_kernel[grid](w, y, total, BLOCK=16)
    added_kernel[grid](x, y, total, BLOCK=16)
""",
    "overwritten_in_a_branch": """
    y = torch.zeros_like(x)
    square_kernel[grid](w, y, 0, total, BLOCK=16)
    z = torch.empty_like(x)
    maybe_kernel[grid](x, z, y, total, BLOCK=16)
    y = y + z
""",
    "overwritten_in_part": """
    y = torch.zeros_like(x)
    square_kernel[grid](x, y, 0, total, BLOCK=16)
    half = (total + 1) // 2
    square_kernel[grid](w, y, half, total - half, BLOCK=16)
""",
}
SHAPES = [{"M": 1, "N": 20}, {"M": 3, "N": 20}, {"M": 4, "N": 9}]


@pytest.mark.parametrize("name", sorted(BODIES))
@pytest.mark.parametrize("first", [0, 1])
def test_call_that_differs_from_the_traced_one__is_right(
    name: str, first: int, write: Callable[[str], Path]
) -> None:
    file = write(SOURCE.replace("BODY", BODIES[name].strip("\n")))
    result = draft(file, SHAPES[first])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


ROWS = """
    y = torch.empty_like(x)
    for i in range(m):
        square_kernel[(triton.cdiv(n, 16),)](x, y, i * n, n, BLOCK=16)
"""


def test_buffer_that_turns_of_a_loop_fill__has_all_gradients(write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("BODY", ROWS.strip("\n")))
    result = draft(file, SHAPES[1])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_buffer_that_one_traced_turn_filled__is_told_in_calls_with_more(write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("BODY", ROWS.strip("\n")))
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(SHAPES[0], "normal")])
    with pytest.raises(AssertionError, match=r"candidate_raised.*holds differentiable values"):
        assert_right(file, result, [(SHAPES[1], "normal")])


def test_buffer_that_is_allocated_before_its_launch__is_not_asked_about(write: Callable[[str], Path]) -> None:
    body = "    y = torch.empty_like(x)\n    square_kernel[grid](x, y, 0, total, BLOCK=16)"
    file = write(SOURCE.replace("BODY", body))
    assert "needs_input_grad" not in draft(file, SHAPES[0])["backward"]


WEIGHTED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 20, "weighted": False}, {"N": 9, "weighted": True}]


@triton.jit
def weighted_kernel(x_ptr, w_ptr, y_ptr, n, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.exp(tl.load(x_ptr + at, mask=at < n, other=0.0))
    if HAS_WEIGHT:
        y = y * tl.load(w_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, y, mask=at < n)


@autodiff(inputs_require_grad=POSITIONS)
def weighted(x, weight=None):
    if weight is not None and weight.stride(-1) != 1:
        weight = weight.contiguous()
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 16),)
    weighted_kernel[grid](x, weight, y, x.numel(), HAS_WEIGHT=weight is not None, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    weight = torch.rand(dims["N"], device=device, dtype=dtype) + 0.5 if dims["weighted"] else None
    return torch.randn(dims["N"], device=device, dtype=dtype), weight
"""


@pytest.mark.parametrize(("positions", "wanted"), [("(0,)", False), ("(0, 1)", True)])
@pytest.mark.parametrize("traced", [False, True])
def test_parameter_without_a_gradient__has_none_where_it_is_none_or_made_contiguous(
    positions: str, wanted: bool, traced: bool, write: Callable[[str], Path]
) -> None:
    file = write(WEIGHTED.replace("POSITIONS", positions))
    result = draft(file, {"N": 20, "weighted": traced})
    assert ("d_w_ptr" in result["backward"]) is wanted
    assert_right(
        file, result, [({"N": 20, "weighted": traced}, "normal"), ({"N": 9, "weighted": True}, "normal")]
    )


HANDED_BACK = """
@autodiff(inputs_require_grad=(0,))
def weighted(x, weight):
    TURNS
    return x


def launched(x, weight):
    weight = weight.contiguous()
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 16),)
    weighted_kernel[grid](x, weight, y, x.numel(), HAS_WEIGHT=True, BLOCK=16)
    return y, NEXT
"""
ONCE = "x, weight = launched(x, weight)"


@pytest.mark.parametrize(
    ("turns", "handed", "wanted"),
    [
        (ONCE, "weight", False),
        (f"for _ in range(1 + (x.numel() < 10)):\n        {ONCE}", "y * 0.5", True),
        (f"{ONCE}\n    {ONCE}", "y * 0.5", True),
    ],
)
def test_parameter_that_a_launcher_hands_back__is_constant_before_that(
    turns: str, handed: str, wanted: bool, write: Callable[[str], Path]
) -> None:
    head, _, rest = WEIGHTED.partition("@autodiff")
    body = HANDED_BACK.replace("TURNS", turns).replace("NEXT", handed)
    file = write(head + body + "\n\ndef make_args" + rest.partition("def make_args")[2])
    result = draft(file, {"N": 20, "weighted": True})
    assert ("d_w_ptr" in result["backward"]) is wanted
    assert_right(file, result, [({"N": n, "weighted": True}, "normal") for n in (20, 9)])


@pytest.mark.parametrize("asked", ["HAS_WEIGHT", "w_ptr is not None"])
def test_launch_without_a_gradient_in_the_traced_call__has_one_where_another_gives_it(
    asked: str, write: Callable[[str], Path]
) -> None:
    """What it reads is a constant there, and None."""
    source = WEIGHTED.replace("POSITIONS", "(0, 1)").replace("if HAS_WEIGHT:", f"if {asked}:")
    source = source.replace("[grid](x, weight", "[grid](x.detach(), weight").replace(
        "return y", "return y * x"
    )
    file = write(source)
    first, other = {"N": 20, "weighted": False}, {"N": 9, "weighted": True}
    result = draft(file, first, case={"dims": first, "seed": 1, "others": [other]})
    assert_right(file, result, [(first, "normal"), (other, "normal")])


def test_call_that_writes_to_what_it_reads__is_told(write: Callable[[str], Path]) -> None:
    """Traced with a buffer of its own; written in place elsewhere, the values would be gone."""
    source = SOURCE.replace(
        "BODY", "    y = torch.empty_like(x) if m > 1 else x * 1.0\n    s = x if m > 1 else y\n"
        "    square_kernel[grid](s, y, 0, total, BLOCK=16)\n"
    )  # fmt: skip
    file = write(source)
    result = draft(file, {"M": 2, "N": 20})
    assert_right(file, result, [({"M": 3, "N": 20}, "normal")])
    with pytest.raises(AssertionError, match="writes to what it also reads"):
        assert_right(file, result, [({"M": 1, "N": 20}, "normal")])


GROUPED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"H": 4, "K": 4}, {"H": 4, "K": 2}]


@triton.jit
def grouped_kernel(x_ptr, y_ptr, heads, kept, n, BLOCK: tl.constexpr):
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = head[:, None] // (heads // kept) * n + tl.arange(0, 8)[None, :]
    mask = (head[:, None] < heads) & (tl.arange(0, 8)[None, :] < n)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, x * x, mask=mask)


@autodiff(inputs_require_grad=(0,))
def grouped(x, heads):
    y = torch.empty_like(x)
    grouped_kernel[(triton.cdiv(heads, 4),)](x, y, heads, x.shape[0], x.shape[1], BLOCK=4)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.randn(dims["K"], 6, device=device, dtype=dtype), dims["H"]
"""


def test_heads_that_share_rows_in_another_size__are_refused(write: Callable[[str], Path]) -> None:
    """Where each head has a row of its own, nothing is stored twice; where two share one, both store it."""
    file = write(GROUPED)
    alone, shared = {"H": 4, "K": 4}, {"H": 4, "K": 2}
    assert draft(file, alone)["backward"]
    with pytest.raises(errors.Unusable, match="stored to at one address") as refused:
        draft(file, alone, case={"dims": alone, "seed": 1, "others": [shared]})
    assert "tl.store" in file.read_text().splitlines()[(refused.value.line or 0) - 1]

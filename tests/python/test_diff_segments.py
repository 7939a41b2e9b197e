"""Scans of pairs of a value and a flag that starts the sum anew, or scales what was before."""

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

SWEEP = [{"M": 3, "N": 40}]


@triton.jit
def step(PARAMETERS):
    return RETURNED


@triton.jit
def scan_kernel(x_ptr, f_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    f = tl.load(f_ptr + at, mask=mask, other=0)
    x, f = x * x, FLAG
    SCANNED
    tl.store(y_ptr + at, y * x, mask=mask)


@autodiff(inputs_require_grad=WANTED)
def scanned(x, f):
    x, f = x.contiguous(), f.contiguous()
    y = torch.empty_like(x)
    scan_kernel[(x.shape[0],)](x, f, y, x.shape[1], BLOCK=64)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return x, MADE
"""
INTEGERS = "(torch.rand(x.shape, device=device) < 0.2).to(torch.int32)"
STEPS = {
    "chosen": ("f | g, tl.where(g != 0, b, a + b)", "f"),
    "chosen by a number": ("f | g, tl.where(g, b, a + b)", "f"),
    "the other way": ("tl.maximum(f, g), tl.where(g == 0, b + a, b)", "f"),
    "a product": ("f + g - f * g, a * (1 - g) + b", "f"),
    "of nothing": ("f | g, b + tl.where(g > 0, 0.0, a)", "f"),
    "booleans": ("f | g, tl.where(g, b, a + b)", "f != 0"),
}
DIMS = [{"M": m, "N": n} for m, n in ((3, 40), (2, 64), (1, 7))]


def source_of(
    returned: str,
    flag: str = "f",
    first: bool = False,
    reverse: bool = False,
    scanned: str = "",
    wanted: str = "(0,)",
    made: str = INTEGERS,
) -> str:
    pairs = ("x, f", "y, _", "a, f, b, g") if first else ("f, x", "_, y", "f, a, g, b")
    if first:
        flags, value = returned.split(", ", 1) if returned[0] == "f" else returned.split("), ", 1)
        returned = f"{value}, {flags}" if returned[0] == "f" else f"{value}, {flags})"
    default = f"{pairs[1]} = tl.associative_scan(({pairs[0]}), 0, step, reverse={reverse})"
    text = SOURCE.replace("PARAMETERS", pairs[2]).replace("RETURNED", returned).replace("FLAG", flag)
    text = text.replace("SCANNED", scanned or default).replace("WANTED", wanted)
    return text.replace("MADE", made)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", sorted(STEPS))
def test_segments__have_the_gradient_of_a_recurrence(
    name: str, first: bool, reverse: bool, write: Callable[[str], Path]
) -> None:
    returned, flag = STEPS[name]
    file = write(source_of(returned, flag, first, reverse))
    result = draft(file, DIMS[0])
    assert "atomic_add" not in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


def test_scale_that_is_differentiable__has_a_gradient(write: Callable[[str], Path]) -> None:
    """(1 - f) scales what was before; what f becomes is used by nobody."""
    step = "1 - (1 - f) * (1 - g), a * (1 - g) + b"
    file = write(source_of(step, wanted="(0, 1)", made="torch.rand(x.shape, device=device, dtype=dtype)"))
    result = draft(file, DIMS[0])
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


@pytest.mark.parametrize(
    ("step", "scanned", "message"),
    [
        ("f | g, tl.where(f != 0, b, a + b)", "", "no first-order recurrence"),  # asks the left flag
        ("f | g, tl.where(g != 0, b, a * b)", "", "no first-order recurrence"),
        ("f | g, tl.where(g != 0, b, a + 2 * b)", "", "no first-order recurrence"),
        (
            "f | g, tl.where(g != 0, b, a + b)",
            "h, y = tl.associative_scan((f, x), 0, step)\n    y = y * h",
            "makes of the flags",
        ),
    ],
)
def test_other_pairs__are_refused(
    step: str, scanned: str, message: str, write: Callable[[str], Path]
) -> None:
    file = write(source_of(step, scanned=scanned))
    with pytest.raises(errors.Unusable, match=message):
        draft(file, DIMS[0])


def test_flags_that_are_scanned_alone__may_be_used(write: Callable[[str], Path]) -> None:
    """The remedy of the last of them."""
    scanned = "_, y = tl.associative_scan((f, x), 0, step)\n    y = y * tl.associative_scan(f, 0, either)"
    text = source_of("f | g, tl.where(g != 0, b, a + b)", scanned=scanned)
    either = "@triton.jit\ndef either(f, g):\n    return f | g\n\n\n@triton.jit\ndef scan_kernel"
    file = write(text.replace("@triton.jit\ndef scan_kernel", either))
    assert_right(file, draft(file, DIMS[0]), [(dims, "normal") for dims in DIMS])

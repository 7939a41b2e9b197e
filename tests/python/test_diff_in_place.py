"""Kernels that read what they write: a load after a store sees what was stored."""

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

SWEEP = [{"N": 40}]


@triton.jit
def step_kernel(x_ptr, y_ptr, total_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
BODY


@autodiff(inputs_require_grad=(0, 1))
def step(x, y):
    x, total = x * 1.0, torch.zeros_like(y)
    step_kernel[(triton.cdiv(x.numel(), 16),)](x, y, total, x.numel(), BLOCK=16)
    return x, total


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], device=device, dtype=dtype) for _ in range(2))
"""
LOAD = "tl.load(x_ptr + at, mask=mask, other=0.5)"
BODIES = {
    "before_and_after": f"""
    x = {LOAD}
    tl.store(x_ptr + at, x * x, mask=mask)
    tl.store(total_ptr + at, tl.sin({LOAD}), mask=mask)
""",
    "after_only": f"""
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    tl.store(x_ptr + at, y * y, mask=mask)
    tl.store(total_ptr + at, tl.exp(-{LOAD}) * y, mask=mask)
""",
    "lanes_that_meet": f"""
    x = {LOAD}
    tl.store(x_ptr + at, x * 2, mask=mask)
    again = {LOAD}
    tl.store(total_ptr + at, again * tl.sum(again * again, axis=0), mask=mask)
""",
    "in_a_branch": f"""
    x = {LOAD}
    tl.store(x_ptr + at, x * x, mask=mask)
    if n > 20:
        x = tl.cos({LOAD})
    tl.store(total_ptr + at, x, mask=mask)
""",
    "in_every_branch": f"""
    x = {LOAD}
    if n > 20:
        tl.store(x_ptr + at, x * x, mask=mask)
    elif n > 10:
        tl.store(x_ptr + at, tl.sin(x), mask=mask)
    else:
        tl.store(x_ptr + at, tl.exp(x), mask=mask)
    tl.store(total_ptr + at, x * x * x, mask=mask)
""",
}


@pytest.mark.parametrize("name", sorted(BODIES))
def test_load_after_a_store__sees_what_was_stored(name: str, write: Callable[[str], Path]) -> None:
    file = write(SOURCE.replace("BODY", BODIES[name].strip("\n")))
    result = draft(file, {"N": 40})
    assert_right(file, result, [({"N": n}, "normal") for n in (40, 7, 16)])


LATER = {
    "a launch": "step_kernel[(triton.cdiv(x.numel(), 16),)](total, y, x, x.numel(), BLOCK=16)",
    "torch": "x.mul_(2)",
}


@pytest.mark.parametrize("name", sorted(LATER))
def test_tensor_that_is_changed_after_a_launch__is_kept_as_it_was(
    name: str, write: Callable[[str], Path]
) -> None:
    body = f"    x = {LOAD}\n    tl.store(total_ptr + at, tl.sin(x) * x, mask=mask)"
    source = SOURCE.replace("BODY", body).replace("    return x,", f"    {LATER[name]}\n    return x,")
    file = write(source)
    result = draft(file, {"N": 40})
    assert_right(file, result, [({"N": n}, "normal") for n in (40, 7, 16)])
    assert result["backward"].count(".clone()") == 1  # of what is changed, and of nothing else


def test_upstream_that_is_overwritten__is_read_before(write: Callable[[str], Path]) -> None:
    """Two reads of y: what the second adds is no matter of a later launch, where the upstream is gone."""
    body = f"""    x = {LOAD}
    y = tl.load(y_ptr + at, mask=mask, other=0.0)
    half = tl.load(y_ptr + at // 2, mask=mask, other=0.0)
    tl.store(x_ptr + at, x * y + half, mask=mask)"""
    file = write(SOURCE.replace("BODY", body))
    result = draft(file, {"N": 40})
    assert_right(file, result, [({"N": n}, "normal") for n in (40, 7, 16)])


HALF = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20}]


@triton.jit
def gate_kernel(x_ptr, read_m, read_n, write_m, write_n, m, n, BM: tl.constexpr, BN: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (cols < n)[None, :] * (rows < m)[:, None]
    up = tl.load(x_ptr + rows[:, None] * read_m + (cols[None, :] + n) * read_n, mask=mask, other=0.0)
    gate = tl.load(x_ptr + rows[:, None] * read_m + cols[None, :] * read_n, mask=mask, other=0.0)
    at = rows[:, None] * write_m + cols[None, :] * write_n
    tl.store(x_ptr + at, up * gate * tl.sigmoid(gate), mask=mask)


def gated(x):
    STRIDES
    m, n = x.shape[0], x.shape[1] // 2
    gate_kernel[(triton.cdiv(m, 4), triton.cdiv(n, 16))](x, PASSED, m, n, BM=4, BN=16)
    return RETURNED


@autodiff(inputs_require_grad=(0,))
def gate(x):
    return gated(x.clone())


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], 2 * dims["N"], device=device, dtype=dtype),)
"""
STRIDES = {
    "in variables": ("a, b = x.stride(0), x.stride(1)\n    c, d = x.stride(0), x.stride(1)", "a, b, c, d"),
    "in the launch": ("x = x.contiguous()", "x.stride(0), x.stride(1), x.stride(0), x.stride(1)"),
    "in both": ("a = x.stride(0)\n    b = x.stride(1)", "a, x.stride(1), x.stride(0), b"),
    "once": ("a = x.stride(0)\n    b = x.stride(1)", "a, b, a, b"),
}


@pytest.mark.parametrize("returned", ["x", "x[:, :n]"])
@pytest.mark.parametrize("name", sorted(STRIDES))
def test_half_of_a_row_that_is_only_read__keeps_its_upstream(
    name: str, returned: str, write: Callable[[str], Path]
) -> None:
    """A gated activation over its own input: the half that is not overwritten is an output too, and its
    gradient is what comes from above and what the other half asks of it."""
    strides, passed = STRIDES[name]
    text = HALF.replace("STRIDES", strides).replace("PASSED", passed).replace("RETURNED", returned)
    file = write(text)
    result = draft(file, {"M": 5, "N": 20})
    assert "atomic_add" not in result["backward"]
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (3, 16), (9, 33))])


@pytest.mark.parametrize(
    "strides",
    [
        "a, b = x.stride(0), x.stride(1)\n    y = x\n    x = y[:, :]\n    c, d = x.stride(0), x.stride(1)",
        "a, b, c, d = *x.stride(), *x.stride()",
    ],
)
def test_strides_that_may_differ__are_not_taken_for_one(strides: str, write: Callable[[str], Path]) -> None:
    text = HALF.replace("STRIDES", strides).replace("PASSED", "a, b, c, d").replace("RETURNED", "x")
    with pytest.raises(errors.Unusable, match="written and read at different addresses"):
        draft(write(text), {"M": 5, "N": 20})


def test_half_that_may_be_overwritten__is_refused(write: Callable[[str], Path]) -> None:
    """Reads that reach into what other programs write are no matter of this launch's upstream."""
    text = HALF.replace("STRIDES", "a, b = x.stride(0), x.stride(1)").replace("PASSED", "a, b, a, b")
    text = text.replace("RETURNED", "x").replace("(cols[None, :] + n) *", "(cols[None, :] + n - 1) *")
    with pytest.raises(errors.Unusable, match="written and read at different addresses"):
        draft(write(text), {"M": 5, "N": 20})

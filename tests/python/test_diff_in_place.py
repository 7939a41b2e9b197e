"""Kernels that read what they write: a load after a store sees what was stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

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

"""Checkpoints in place of a tape: the same gradients from the memory of two short loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diff_support import assert_right, draft, errors
from kernel_agent.differentiate.reverse import forward_values

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "T": 11, "D": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["B"], dims["T"], dims["D"], device=device, dtype=dtype)
    return x, torch.randn(dims["D"], dims["D"], device=device, dtype=dtype) * 0.3


@triton.jit
def cell_kernel(x_ptr, w_ptr, h_ptr, all_ptr, steps, D: tl.constexpr):
    batch = tl.program_id(0)
    dims = tl.arange(0, D)
    w = tl.load(w_ptr + dims[:, None] * D + dims[None, :])
    h = tl.zeros([D], dtype=tl.float32)
    c = tl.zeros([D], dtype=tl.float32)
    x_row = x_ptr + batch * steps * D + dims
"""
STUB = """
    tl.store(h_ptr + batch * D + dims, h + c)


@autodiff(inputs_require_grad=(0, 1))
def cell(x, w):
    b, steps, d = x.shape
    h = torch.empty(b, d, dtype=x.dtype, device=x.device)
    states = torch.zeros_like(x)
    cell_kernel[(b,)](x, w, h, states, steps, D=d)
    return h, states
"""
CELLS: dict[str, str] = {
    "one_state": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        h = tl.sin(tl.sum(w * h[None, :], axis=1) + x)""",
    "two_states": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        c = tl.sin(c) * 0.5 + tl.sum(w * h[None, :], axis=1)
        h = tl.cos(c * x + h)""",
    "start_and_step": """
    for t in range(1, steps, 2):
        x = tl.load(x_row + t * D)
        h = tl.sin(tl.sum(w * h[None, :], axis=1) + x)""",
    "branch": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        if t % 3 == 1:
            h = tl.sin(h * x)
        else:
            h = tl.cos(h + x) * tl.sum(w * h[None, :], axis=1)""",
    "inner_loop": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        for i in range(2):
            c += tl.sum(w * x[None, :], axis=1) * (i + 1) * h
        h = tl.sin(h + x) + 0.1 * c""",
    "inner_state": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        for i in range(3):
            h = tl.sin(tl.sum(w * h[None, :], axis=1) + x)""",
    "outer_loop": """
    for s in range(2):
        for t in range(0, steps):
            x = tl.load(x_row + t * D)
            h = tl.sin(tl.sum(w * h[None, :], axis=1) * 0.3 * (s + 1) + x)""",
    "counter": """
    seen = 0
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        seen = seen * 2 + t
        h = tl.sin(h * 0.4 * (seen % 3 + 1) + x)""",
    "one_stored": """
    for t in range(0, steps):
        x = tl.load(x_row + t * D)
        c = tl.sin(c + x)
        h = tl.cos(h * c) + x
        tl.store(all_ptr + batch * steps * D + t * D + dims, h)""",
}
SHAPES = [{"B": 2, "T": t, "D": 16} for t in (11, 1, 2, 3, 4, 16, 17)]


@pytest.fixture
def small_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_values, "LIMIT", 0)


def report_of(result: dict[str, Any]) -> str:
    return " ".join(line["reason"] for line in result["report"]["lines"] if line["class"] == "tape")


@pytest.mark.parametrize("name", sorted(CELLS))
def test_cell__has_the_same_gradients_from_checkpoints(
    name: str, write: Callable[..., Path], small_tape: None
) -> None:
    file = write(HEAD + CELLS[name] + STUB)
    result = draft(file, SHAPES[0])
    assert "checkpoints" in report_of(result)
    around_a_tape = name in ("inner_state", "outer_loop")  # such a loop keeps its own whole
    assert ("in scratch" in report_of(result)) == around_a_tape
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_buffers__grow_with_the_square_root_of_the_steps(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(HEAD + CELLS["one_state"] + STUB)
    dims = {"B": 2, "T": 1024, "D": 16}
    full = draft(file, dims)["report"]
    assert full["tape_bytes"] == 2 * 1024 * 16 * 4
    monkeypatch.setattr(forward_values, "LIMIT", full["tape_bytes"])
    assert draft(file, dims)["report"]["tape_bytes"] == full["tape_bytes"]  # not above the limit
    monkeypatch.setattr(forward_values, "LIMIT", full["tape_bytes"] - 1)
    result = draft(file, dims)
    assert result["report"]["tape_bytes"] == 2 * (33 + 1024 // 33 + 2) * 16 * 4
    assert "would exceed 128.00 KiB" in report_of(result)
    found = errors(file, result["backward"], [({"B": 1, "T": 70, "D": 16}, "normal")])
    assert all(value <= 1e-5 for values in found.values() for value in values), found

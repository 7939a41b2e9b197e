"""Writes at a fixed distance from each other, and a program's own further write: stored where they meet
nowhere, also where the forward rewrites a buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

HALVES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 10}]


@triton.jit
def turn_kernel(x, y, stride, half, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < half
    a = tl.load(x + row * stride + cols, mask=mask, other=0.0)
    b = tl.load(x + row * stride + cols + half, mask=mask, other=0.0)
    tl.store(y + row * stride + cols, a * b, mask=mask)
    tl.store(y + row * stride + cols + half, tl.sin(a) - b, mask=mask)


@autodiff(inputs_require_grad=(0,))
def turn(x):
    y = torch.empty_like(x)
    half = x.shape[1] // 2
    turn_kernel[(x.shape[0],)](x, y, x.stride(0), half, BLOCK=triton.next_power_of_2(half))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], 2 * (dims["N"] // 2), device=device, dtype=dtype),)
"""
CASES = [({"M": m, "N": n}, "normal") for m, n in ((3, 10), (1, 32), (4, 2), (2, 14))]
FORMS = {
    "two buffers": [],
    "one buffer": [("y = torch.empty_like(x)", "y = x.clone()"), ("turn_kernel[(x.shape[0],)](x,", "turn_kernel[(x.shape[0],)](y,")],
    "one buffer, a part only written": [
        ("y = torch.empty_like(x)", "y = torch.cat((x, x * x), dim=1)"),
        ("(x, y, x.stride(0)", "(y, y, y.stride(0)"),
        ("    tl.store(y + row * stride + cols, a", "    tl.store(y + row * stride + 2 * half + cols, b * b * a, mask=mask)\n    tl.store(y + row * stride + cols, a"),
    ],
}  # fmt: skip


def edited(source: str, edits: list[tuple[str, str]]) -> str:
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("form", FORMS)
def test_halves_of_a_row__are_stored_by_their_program(form: str, write: Callable[[str], Path]) -> None:
    source = edited(HALVES, FORMS[form])
    if form != "two buffers":  # one pointer for what is read and written
        source = source.replace("turn_kernel(x, y, stride", "turn_kernel(y, z, stride").replace(
            "tl.load(x +", "tl.load(y +"
        )
    file = write(source)
    result = draft(file, {"M": 3, "N": 10})
    assert result["report"]["atomics"] == 0 and "_after" not in result["backward"]
    assert_right(file, result, CASES)


def test_halves_that_are_a_whole_buffer__need_no_zeros(write: Callable[[str], Path]) -> None:
    result = draft(write(HALVES), {"M": 3, "N": 10})
    assert "gradient_of(x, written=" in result["backward"]


def test_windows_that_meet__are_not_apart(write: Callable[[str], Path]) -> None:
    file = write(HALVES.replace("x + row * stride + cols + half", "x + row * stride + cols + 1"))
    result = draft(file, {"M": 3, "N": 10})
    assert result["report"]["atomics"] > 0 or "_after" in result["backward"]
    assert_right(file, result, CASES)


TWICE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "G": 2, "C": 3, "H": 7}]


@triton.jit
def norm_kernel(x, y, w, M_STRIDE, G_STRIDE, size, C, BLOCK: tl.constexpr):
    m, group = tl.program_id(0), tl.program_id(1)
    x += m * M_STRIDE + group * G_STRIDE
    y += m * M_STRIDE + group * G_STRIDE
    lanes = tl.arange(0, BLOCK)
    total = 0.0
    for i in range(0, size, BLOCK):
        value = tl.load(x + i + lanes, mask=i + lanes < size, other=0.0)
        total += tl.sum(value * value)
    scale = tl.rsqrt(total / size + 1e-3)
    part = size // C
    for channel in range(group * C, (group + 1) * C):
        weight = tl.load(w + channel)
        for i in range(0, part, BLOCK):
            mask = i + lanes < part
            tl.store(y + i + lanes, tl.load(x + i + lanes, mask=mask, other=0.0) * scale * weight, mask=mask)
        x += part
        y += part


@autodiff(inputs_require_grad=(0, 1))
def norm(x, w):
    y = torch.empty_like(x)
    M, G, size = x.shape
    norm_kernel[(M, G)](x, y, w, x.stride(0), x.stride(1), size, w.numel() // G, BLOCK=4)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["G"], dims["C"] * dims["H"], device=device, dtype=dtype)
    return x, torch.rand(dims["G"] * dims["C"], device=device, dtype=dtype)
"""
SHAPES = [
    ({"M": m, "G": g, "C": c, "H": h}, "normal") for m, g, c, h in ((3, 2, 3, 7), (1, 1, 1, 9), (2, 4, 2, 4))
]


def test_row_that_is_read_twice__has_a_store_and_an_addition(write: Callable[[str], Path]) -> None:
    file = write(TWICE)
    result = draft(file, {"M": 3, "G": 2, "C": 3, "H": 7})
    kernel = result["backward"].split("# recompute")[1].split("\ndef ")[0]
    assert "tl.atomic_add(d_x" not in kernel
    assert kernel.index("tl.store(d_x") < kernel.index("tl.debug_barrier()") < kernel.index("tl.load(d_x")
    assert "disjoint((M_STRIDE, grid[0]), (G_STRIDE, grid[1]), (1, " in result["backward"]
    assert_right(file, result, SHAPES)


def test_row_of_which_another_program_has_elements__is_added_to_atomically(
    write: Callable[[str], Path],
) -> None:
    """The channels of a group are every second one: within a row, but not beside each other."""
    file = write(TWICE.replace("        x += part\n", "        x += 2 * part\n"))
    backward = draft(file, {"M": 3, "G": 2, "C": 3, "H": 7})["backward"]
    assert "tl.atomic_add(d_x" in backward and "tl.debug_barrier()" not in backward

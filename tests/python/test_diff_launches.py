"""How a stub may launch its kernels: every spelling of grid and arguments, with the backward right for other
shapes too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors as unusable

HEAD = """import math

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 4, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)

"""
KERNEL = """
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, row_len, scale, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_len + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + row * row_len + cols, x * x * scale * GAIN, mask=cols < n)

"""
STUB = """
@autodiff(inputs_require_grad=(0,))
def scaled(x):
    m, n = x.shape
    y = torch.empty_like(x)
"""
SHAPES = [{"M": 4, "N": 20}, {"M": 2, "N": 65}, {"M": 1, "N": 1}]

# Before the launch, and the launch
LAUNCHES: dict[str, tuple[str, str]] = {
    "powers": (
        "block = 2 ** (n - 1).bit_length()",
        "scale_kernel[(m, triton.cdiv(n, block))](x, y, n, n * m // m, n**-0.5, GAIN=2**2, BLOCK=block)",
    ),
    "functions": (
        "grid = (max(m, 1), triton.cdiv(n, triton.next_power_of_2(n)))",
        "scale_kernel[grid](x, y, min(n, 10**9), int(n), 1 / math.sqrt(n), GAIN=-(-m // 3), "
        "BLOCK=triton.next_power_of_2(n))",
    ),
    "remainders": (
        "grid = lambda meta: (m, -(-n // meta['BLOCK']) % 1000)",
        "scale_kernel[grid](x, y, n, x.stride(0), scale=float(n) ** 2 % 7, GAIN=2, BLOCK=1 << 4)",
    ),
    "unpacked_dictionary": (
        "meta = {'GAIN': 2, 'BLOCK': 16, 'num_warps': 2}",
        "scale_kernel[(m, triton.cdiv(n, 16))](x, y, n, x.stride(0), 1.5, **meta)",
    ),
    "several_dictionaries": (
        "rest = (n, x.stride(0))",
        "scale_kernel[lambda meta: (m, triton.cdiv(n, meta['BLOCK']))](x, y, *rest, **{'GAIN': 2}, "
        "**dict(BLOCK=16), scale=1.5)",
    ),
    "starred_grid": (
        "more = [triton.cdiv(n, 16)]",
        "scale_kernel[(m, *more)](x, y, n, n, 2.0**2, GAIN=2, BLOCK=16)",
    ),
}


def file_with(write: Callable[..., Path], before: str, launch: str, kernel: str = KERNEL) -> Path:
    return write(HEAD + kernel + STUB + f"    {before}\n    {launch}\n    return y\n")


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_launch__is_made_again_for_any_shape(name: str, write: Callable[..., Path]) -> None:
    file = file_with(write, *LAUNCHES[name])
    result = draft(file, SHAPES[0])
    assert result["report"]["atomics"] == 0
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_unpacked_dictionary__of_other_names_is_told(write: Callable[..., Path]) -> None:
    """The Function has one parameter a name: a key that the traced call had not would be lost."""
    before = "meta = {'GAIN': 2, 'BLOCK': 16} if n == 20 else {'GAIN': 2, 'BLOCK': 16, 'num_warps': 2}"
    file = file_with(
        write, before, "scale_kernel[(m, triton.cdiv(n, 16))](x, y, n, x.stride(0), 1.5, **meta)"
    )
    result = draft(file, SHAPES[0])
    with pytest.raises(AssertionError, match=r"candidate_raised.*made for a launch that unpacks"):
        assert_right(file, result, [(SHAPES[1], "normal")])


def test_unpacked_dictionary__beside_an_autotuner_leaves_it_its_names(write: Callable[..., Path]) -> None:
    tuned = KERNEL.replace(
        "@triton.jit",
        "@triton.autotune([triton.Config({'BLOCK': 16}, num_warps=2)], key=['n'])\n"
        "@triton.heuristics({'GAIN': gain_of})\n@triton.jit",
    )
    kernel = "\ndef gain_of(args):\n    return 3 if args['BLOCK'] > 8 and args['n'] else 0\n\n" + tuned
    launch = "scale_kernel[grid](x, y, **{'n': n, 'row_len': n, 'scale': 0.5})"
    file = file_with(write, "grid = lambda meta: (m, triton.cdiv(n, meta['BLOCK']))", launch, kernel)
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_starred_grid__a_literal_one_is_not_taken_for_the_axis_before_it(write: Callable[..., Path]) -> None:
    """All programs of axis 1 add to one row: that axis must not count as a single program."""
    kernel = """
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, GAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    copy = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + (copy * tl.num_programs(0) + row) * n + cols, x * (copy + 1), mask=cols < n)

"""
    before = "y = torch.empty((3 * m, n), dtype=x.dtype, device=x.device)"
    file = file_with(write, before, "scale_kernel[(*[m, 3], 1)](x, y, n, GAIN=1, BLOCK=128)", kernel)
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


# How the length of a row may be computed in the kernel: the host asks whether rows of that length overlap.
ROW_LENGTHS = [
    "row_len * 2 if n > 1000 else row_len",
    "tl.where((n > 1000) | (n == 0), row_len * 2, row_len)",
    "tl.abs(row_len) & ~(1 << 20)",
    "row_len * BLOCK**2 // (BLOCK**2)",
    "tl.maximum(row_len, n) * triton.next_power_of_2(BLOCK) // BLOCK",
]


@pytest.mark.parametrize("length", ROW_LENGTHS)
def test_row_length__is_computed_again_on_the_host(length: str, write: Callable[..., Path]) -> None:
    kernel = KERNEL.replace("    cols =", f"    pitch = {length}\n    cols =").replace(
        "row * row_len", "row * pitch"
    )
    launch = "scale_kernel[(m, triton.cdiv(n, 16))](x, y, n, n, 1.5, GAIN=2, BLOCK=16)"
    file = file_with(write, "pass", launch, kernel)
    result = draft(file, SHAPES[0])
    assert result["report"]["atomics"] == 0
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_row_length__cut_off_from_a_fraction_is_cut_off_on_the_host(write: Callable[..., Path]) -> None:
    """Rows of 3 elements overlap where the kernel makes 2 of 2.5: the gradient must not be stored then."""
    kernel = KERNEL.replace("    cols =", "    pitch = (row_len * 0.125).to(tl.int32)\n    cols =").replace(
        "x_ptr + row * row_len", "x_ptr + row * pitch"
    )
    launch = "scale_kernel[(m, triton.cdiv(n, 16))](x, y, min(n, 3), n, 1.5, GAIN=2, BLOCK=16)"
    file = file_with(write, "y.zero_()", launch, kernel)
    result = draft(file, {"M": 4, "N": 24})
    assert_right(file, result, [({"M": 4, "N": 24}, "normal")])
    with pytest.raises(AssertionError, match=r"candidate_raised.*overlaps itself"):
        assert_right(file, result, [(SHAPES[0], "normal")])
    assert_right(file, draft(file, SHAPES[0]), [(SHAPES[0], "normal")])  # seen to overlap: added atomically


def test_next_power_of_two__of_a_run_time_value_is_refused(write: Callable[..., Path]) -> None:
    kernel = KERNEL.replace("    cols =", "    pitch = triton.next_power_of_2(row_len)\n    cols =")
    launch = "scale_kernel[(m, triton.cdiv(n, 16))](x, y, n, n, 1.5, GAIN=2, BLOCK=16)"
    with pytest.raises(unusable.Unusable) as caught:
        draft(file_with(write, "pass", launch, kernel), SHAPES[0])
    assert "compile time" in str(caught.value)
    assert caught.value.line is not None


TWICE = """
@triton.jit
def scale_kernel(x_ptr, y_ptr, n, part, gain, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, tl.sin(x) * gain, mask=i < part)

"""
BEFORE = """n, part, grid = x.numel(), PART, (triton.cdiv(x.numel(), 16),)
    scale_kernel[grid](x, y, n, n, 2.0, BLOCK=16)"""
OVERWRITES = {
    "whole": ("x.numel()", "scale_kernel[grid](x * x, y, n, part, 3.0, BLOCK=16)"),
    "slice": (
        "n // 2",
        "scale_kernel[grid](x * x, y.view(-1)[n // 2 :], n - n // 2, n - n // 2, 3.0, BLOCK=16)",
    ),
    "in_a_loop": (
        "n",
        "for i in range(3):\n        scale_kernel[grid](x * (i + 1), y, n, n, 1.0 + i, BLOCK=16)",
    ),
}


@pytest.mark.parametrize("name", sorted(OVERWRITES))
def test_output__that_is_overwritten_keeps_the_last_gradient(name: str, write: Callable[..., Path]) -> None:
    part, launch = OVERWRITES[name]
    file = file_with(write, BEFORE.replace("PART", part), launch, TWICE)
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


INTO_VIEWS = {
    "reshaped": "scale_kernel[grid](x, y.view(-1), n, n, 2.0, BLOCK=16)",
    "by_name": "scale_kernel[grid](x, n=n, y_ptr=y.view(-1), part=n, gain=2.0, BLOCK=16)",
    "beside_others": "z = torch.ones(3, n, device=x.device, dtype=x.dtype)\n"
    "    scale_kernel[grid](x, z[0], n, n, 2.0, BLOCK=16)\n"
    "    scale_kernel[grid](x * x, z[2], n, n, 3.0, BLOCK=16)\n    z[1] = x.reshape(-1)\n    y = z * z",
}


@pytest.mark.parametrize("name", sorted(INTO_VIEWS))
def test_view_as_output__gives_what_it_was_made_from_a_gradient(
    name: str, write: Callable[..., Path]
) -> None:
    before = "n, grid = x.numel(), (triton.cdiv(x.numel(), 16),)"
    file = file_with(write, before, INTO_VIEWS[name], TWICE)
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(dims, "normal") for dims in SHAPES])


def test_view_beside_another_output__is_refused(write: Callable[..., Path]) -> None:
    kernel = TWICE.replace("y_ptr, n", "y_ptr, z_ptr, n").replace(
        "    tl.store(y_ptr", "    tl.store(z_ptr + i, x * x, mask=i < n)\n    tl.store(y_ptr"
    )
    before = "n, grid, z = x.numel(), (triton.cdiv(x.numel(), 16),), torch.empty_like(x)"
    file = file_with(write, before, "scale_kernel[grid](x, y.view(-1), z, n, n, 2.0, BLOCK=16)", kernel)
    with pytest.raises(unusable.Unusable) as caught:
        draft(file, SHAPES[0])
    (refusal,) = caught.value.extra["refusals"]  # type: ignore[attr-defined]
    assert refusal["construct"] == "view as output"
    assert refusal["line"] == len(file.read_text().splitlines()) - 1


def test_output__that_is_overwritten_in_part_is_told(write: Callable[..., Path]) -> None:
    """What is left of the first launch would lose its gradient: n and `part` are equal in the traced call
    only."""
    launch = "scale_kernel[grid](x * x, y, n, part, 3.0, BLOCK=16)"
    file = file_with(write, BEFORE.replace("PART", "80"), launch, TWICE)
    result = draft(file, SHAPES[0])
    assert_right(file, result, [(SHAPES[0], "normal")])
    with pytest.raises(AssertionError, match=r"candidate_raised.*overwritten as a whole"):
        assert_right(file, result, [(SHAPES[1], "normal")])


DECORATED = """import contextlib
import functools

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 4, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


def guarded(stub):
    @functools.wraps(stub)
    def wrapper(*args):
        with contextlib.nullcontext():
            return stub(*(arg.contiguous() for arg in args))

    return wrapper


@triton.jit
def square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x * x, mask=at < n)


@autodiff(inputs_require_grad=(0,))
@torch.no_grad()
@guarded
def squared(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), BLOCK=64)
    return y
"""


def test_decorators_of_the_stub__are_kept_but_those_of_torch(tmp_path: Path) -> None:
    """The kernel takes its input for contiguous: the user's own decorator makes it so."""
    file = tmp_path / "decorated.py"
    file.write_text(DECORATED)
    result = draft(file, {"M": 4, "N": 20})
    backward = result["backward"]
    assert "\n@guarded\ndef squared_autograd(x):" in backward
    assert "no_grad" not in backward
    assert_right(file, result, [({"M": 4, "N": 20}, "normal"), ({"M": 3, "N": 65}, "transposed")])

"""Outputs of a launch that are parts of one tensor: autograd follows a launch into one view alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from kernel_agent.errors import Unusable

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 21}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


@triton.jit
def moments_kernel(x_ptr, mean_ptr, square_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(mean_ptr + row, tl.sum(x, axis=0) / N)
    tl.store(square_ptr + row, tl.sum(x * x, axis=0) / N)


@triton.jit
def scaled_kernel(x_ptr, mean_ptr, square_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mean = tl.load(mean_ptr + row)
    scale = tl.rsqrt(tl.load(square_ptr + row) - mean * mean + 1e-3)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, (x - mean) * scale, mask=cols < N)


def normed(x):
    M, N = x.shape
    y = torch.empty_like(x)
    mean, square = torch.empty((2, M), device=x.device, dtype=torch.float32)
    moments_kernel[(M,)](x, mean, square, N, BLOCK=32)
    scaled_kernel[(M,)](x, mean, square, y, N, BLOCK=32)
    return y


@autodiff(inputs_require_grad=(0,))
def norm(x):
    return normed(x)
"""
FRESH = "torch.empty((2, M), device=x.device, dtype=torch.float32)"
IN_THE_STUB = [("def normed(x):\n", "@autodiff(inputs_require_grad=(0,))\ndef norm(x):\n"),
               ("\n\n@autodiff(inputs_require_grad=(0,))\ndef norm(x):\n    return normed(x)\n", "")]  # fmt: skip
STARRED = [("mean, square = torch", "part = torch"), ("(x, mean, square, N", "(x, *part, N"),
           ("(x, mean, square, y", "(x, *part, y")]  # fmt: skip
BY_NUMBER = [*STARRED[:2], ("(x, mean, square, y", "(x, part[0], part[1], y")]
DIMS = [{"M": 5, "N": 21}, {"M": 1, "N": 32}]


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    return edits_of(SOURCE, tmp_path / "norm.py")


@pytest.mark.parametrize(
    "edits", [[], IN_THE_STUB, STARRED, BY_NUMBER], ids=["two", "stub", "starred", "number"]
)
def test_parts_of_a_fresh_tensor__are_outputs_like_any(edits: list, edited: Callable[..., Path]) -> None:
    if edits is IN_THE_STUB:
        edits = [edits[1], edits[0]]
    file = edited(*edits)
    before = file.read_text()
    result = draft(file, DIMS[0])
    assert f"= parted({FRESH})" in result["backward"] and file.read_text() == before
    assert_right(file, result, [(dims, layout) for dims in DIMS for layout in ("normal", "expanded")])


WHOLE = [*BY_NUMBER, ("    return y\n", "    return y + 0 * part.sum()\n")]
WRITTEN = [*BY_NUMBER, ("    return y\n", "    part[0] = 1.0\n    return y\n")]


DECORATED = [("def normed(x):\n", "@torch.no_grad()\ndef normed(x):\n")]


@pytest.mark.parametrize("edits", [WHOLE, WRITTEN, DECORATED], ids=["whole", "written", "decorated"])
def test_tensor_that_is_used_beside_its_parts__is_not_parted(
    edits: list, edited: Callable[..., Path]
) -> None:
    with pytest.raises(Unusable, match="`mean_ptr` is a view"):
        draft(edited(*edits), DIMS[0])


TURNED = [("    y = torch.empty_like(x)\n", "    y = torch.empty((N, M), device=x.device, dtype=x.dtype).transpose(0, 1)\n"),
          ("    mean, square = torch.empty((2, M), device=x.device, dtype=torch.float32)\n",
           "    mean, square = (torch.empty(M, device=x.device, dtype=torch.float32) for _ in range(2))\n"),
          ("tl.store(y_ptr + row * N + cols, (x - mean) * scale, mask=cols < N)",
           "tl.store(y_ptr + row + cols * M, (x - mean) * scale, mask=cols < N)\n    tl.store(scale_ptr + row, scale)"),
          ("y_ptr, N, BLOCK", "y_ptr, scale_ptr, M, N, BLOCK"), ("y, N, BLOCK=32)", "y, torch.empty_like(mean), M, N, BLOCK=32)")]  # fmt: skip


def test_view_of_a_fresh_tensor_beside_another_output__is_an_output_like_any(
    edited: Callable[..., Path],
) -> None:
    file = edited(*TURNED)
    result = draft(file, DIMS[0])
    assert "dtype=x.dtype).transpose(0, 1).detach()" in result["backward"]
    assert_right(file, result, [(dims, layout) for dims in DIMS for layout in ("normal", "expanded")])

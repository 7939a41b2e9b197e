"""Gradients that are the upstream gradient, or another one: the host hands them on, nobody writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, pair_text
from kernel_agent import forward

RESIDUAL = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def residual_kernel(x_ptr, f_ptr, g_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    offs = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, x + f * g, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def residual(x, f, g):
    y = torch.empty_like(x)
    M, N = x.shape
    residual_kernel[(M,)](x, f, g, y, N, BLOCK=triton.next_power_of_2(N))
    return y


SWEEP = [{"M": 5, "N": 12}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(3))
"""
DIMS = {"M": 5, "N": 12}
OTHERS = [(DIMS, "normal"), ({"M": 3, "N": 17}, "normal"), ({"M": 1, "N": 1}, "normal"), (DIMS, "expanded")]
VALUE, MADE = "x + f * g", "y = torch.empty_like(x)"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(RESIDUAL, tmp_path / "residual.py", once=False)


def gradients(file: Path, result: dict[str, Any], upstream: torch.Tensor, *inputs: torch.Tensor):
    """What autograd gets of the pair."""
    pair = file.with_name("pair.py")
    pair.write_text(pair_text(file.read_text(), result["backward"]))
    entry = getattr(forward.load(pair).module, result["entry"])
    leaves = [value.requires_grad_() for value in inputs]
    return torch.autograd.grad(entry(*leaves), leaves, upstream, allow_unused=True)


def example(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(5, 12, dtype=dtype) for _ in range(count)]


def test_residual__has_the_upstream_for_its_gradient(changed) -> None:
    file = changed()
    result = draft(file, DIMS)
    assert "handed_on(d_y_ptr, x_ptr, grid[0] * min(N, BLOCK))" in result["backward"]
    assert_right(file, result, OTHERS)
    upstream = torch.randn(5, 12)
    dx, df, dg = gradients(file, result, upstream, *example())
    assert dx.data_ptr() == upstream.data_ptr() and df.data_ptr() != dg.data_ptr()


def test_upstream_laid_out_otherwise__is_copied_once_and_handed_on(changed) -> None:
    file = changed()
    result = draft(file, DIMS)
    upstream = torch.randn(12, 5).t()
    x, f, g = example()
    dx, df, _ = gradients(file, result, upstream, x, f, g)
    assert dx.data_ptr() != upstream.data_ptr() and dx.stride() == (12, 1)
    assert torch.equal(dx, upstream) and torch.allclose(df, upstream * g)


OWN = {
    "a part of the output": (VALUE, "tl.where(cols < N // 2, x, 0.0) + f * g"),
    "times a number": (VALUE, "2 * x + f * g"),
    "from a lane beside": (VALUE, "tl.load(x_ptr + offs - cols + (cols + 1) % N, mask=mask) + f * g"),
    "added to by other programs": ("tl.load(x_ptr + offs", "tl.load(x_ptr + cols"),
    "where a branch is taken": (VALUE, "f * g + (x if N > 4 else 0.0)"),
}


@pytest.mark.parametrize("edit", OWN.values(), ids=OWN)
def test_gradient_that_is_no_copy__is_written(changed, edit) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert "handed_on" not in result["backward"]
    assert_right(file, result, OTHERS)


def test_input_longer_than_the_output__has_zeros_behind_the_upstream(changed) -> None:
    rows = "torch.randn(dims['M'] + 2, dims['N'], device=device, dtype=dtype)"
    file = changed(
        (MADE, "y = torch.empty_like(f)"),
        ("M, N = x.shape", "M, N = f.shape"),
        ("for _ in range(3))", f"for _ in range(3))[1:] + ({rows},)"),
        ("def residual(x, f, g):", "def residual(f, g, x):"),
    )
    result = draft(file, DIMS)
    assert "handed_on" in result["backward"]
    assert_right(file, result, OTHERS[:2])


def test_input_laid_out_otherwise__has_a_gradient_of_its_own(changed) -> None:
    """Its kernel reads x as the transposed one that it is, so that places differ from those of y."""
    file = changed(("residual_kernel[(M,)](x, f", "residual_kernel[(M,)](x.t().contiguous().view(M, N), f"))
    result = draft(file, DIMS)
    assert_right(file, result, OTHERS)


def test_input_of_another_type__has_a_gradient_of_its_own(changed) -> None:
    file = changed(
        (MADE, "y = torch.empty_like(x, dtype=torch.float32)"),
        ("(M,)](x, f,", "(M,)](x.contiguous(), f,"),
    )
    result = draft(file, DIMS)
    upstream = torch.randn(5, 12)
    dx, *_ = gradients(file, result, upstream, *example(dtype=torch.bfloat16))
    assert dx.dtype is torch.bfloat16 and torch.equal(dx, upstream.bfloat16())


def test_sum_of_two_inputs__launches_nothing(changed) -> None:
    file = changed((VALUE, "x + f"))
    result = draft(file, DIMS)
    assert "if d_x_ptr is not d_y_ptr or d_f_ptr is not d_y_ptr:" in result["backward"]
    upstream = torch.randn(5, 12)
    assert all(d.data_ptr() == upstream.data_ptr() for d in gradients(file, result, upstream, *example())[:2])
    assert_right(file, result, OTHERS)


def test_launch_that_keeps_something_for_another__is_made(tmp_path: Path) -> None:
    pair = (ROOT / "dataset/matmul_epilogue/linear_layer_scale_residual.py").read_text()
    file = tmp_path / "layer.py"
    file.write_text(pair.partition(MARKER)[0])
    sizes = forward.load(file).module.SWEEP_CPU
    result = draft(file, sizes[0])
    assert "None if d_r_ptr is d_y_ptr else d_r_ptr, spill_d" in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in sizes], 1e-4)


def test_two_inputs_of_one_sum__have_one_gradient(changed) -> None:
    file = changed((VALUE, "(x + f) * g"))
    result = draft(file, DIMS)
    assert "handed_on(d_x_ptr, f_ptr" in result["backward"]
    dx, df, dg = gradients(file, result, torch.randn(5, 12), *example())
    assert dx.data_ptr() == df.data_ptr() != dg.data_ptr()
    assert_right(file, result, OTHERS)


def test_launch_without_programs__leaves_nothing_handed_on(changed) -> None:
    file = changed()
    result = draft(file, DIMS)
    empty = [torch.randn(0, 12) for _ in range(3)]
    assert [d.shape for d in gradients(file, result, torch.randn(0, 12), *empty)] == [(0, 12)] * 3

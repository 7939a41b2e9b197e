"""tanh in a backward: a helper without branches, as exact as float32 is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diff_support import assert_right, draft
from kernel_agent.differentiate.write.helpers import TANH_TEXT

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from triton.language.extra.libdevice import tanh

SWEEP = [{"N": 70}]


@triton.jit
def kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + cols, tanh(x) * x, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def stub(x):
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype) * 3,)
"""


def helper() -> object:
    space: dict = {"tl": SimpleNamespace(exp2=torch.exp2, where=torch.where)}
    exec(TANH_TEXT.replace("@triton.jit", ""), space)  # noqa: S102
    return space["tanh_f32"]


def test_tanh__of_any_number__is_that_of_float64() -> None:
    exponents = torch.cat([torch.linspace(-30, 1.2, 400_001), torch.linspace(-0.7, -0.5, 50_001)])
    x = (10**exponents).double().float()
    x = torch.cat([x, -x, torch.tensor([0.25, -0.25, 20.0, 100.0])])
    right = torch.tanh(x.double())
    error = ((helper()(x).double() - right) / right).abs().max()  # type: ignore[operator]
    assert error < 2e-6


@pytest.mark.parametrize(("x", "y"), [(0.0, 0.0), (float("inf"), 1.0), (-float("inf"), -1.0)])
def test_tanh__at_its_ends__is_a_number(x: float, y: float) -> None:
    assert helper()(torch.tensor(x)).item() == y  # type: ignore[operator]


def test_tanh__of_what_is_none__is_none() -> None:
    assert helper()(torch.tensor(float("nan"))).isnan()  # type: ignore[operator]


@pytest.mark.parametrize(("cast", "count"), [(".to(tl.float32)", 1), ("", 0)])
def test_backward__of_a_block_of_float32__calls_the_helper(tmp_path: Path, cast: str, count: int) -> None:
    """What has the type of the tensor may be float64, for which the helper has too few digits."""
    file = tmp_path / "file.py"
    file.write_text(SOURCE.replace(".to(tl.float32)", cast))
    result = draft(file, {"N": 70})
    text = result["backward"]
    assert text.count("def tanh_f32(") == text.count("= tanh_f32(x)") == count
    assert_right(file, result, [({"N": 70}, "normal"), ({"N": 1}, "normal")])

"""Maxima that a forward only subtracts are constants where the rounding of eager PyTorch is evaluated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle_support import relative, run_case

FORWARD = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 64, "C": 40}]


@triton.jit
def row_kernel(x_ptr, y_ptr, C, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * C + cols, mask=cols < C, other=-float("inf"))
    top = tl.max(x, axis=0)
    e = tl.exp(x - top)
    tl.store(y_ptr + row * C + cols, RESULT, mask=cols < C)


@autodiff(inputs_require_grad=(0,))
def rows(x):
    y = torch.empty_like(x)
    row_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=64)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["C"], device=device, dtype=dtype)
    x[:, 3] += 15
    return (x,)
"""


def case_of(write, tmp_path: Path, result: str, **fields) -> tuple[dict, dict[str, torch.Tensor]]:
    case, found = run_case(write(FORWARD.replace("RESULT", result)), tmp_path, **fields)
    assert case["ok"], case.get("error")
    return case, found


def test_softmax__rounds_where_one_element_has_nearly_all_the_weight(write, tmp_path: Path) -> None:
    """p * (dp - sum(p * dp)) is a difference of equal numbers there. With what arrives at the maximum it
    would be right to 1e-7 of what is left."""
    _, found = case_of(write, tmp_path, "e / tl.sum(e, axis=0)")
    off = (found["base/x"][:, 3].double() - found["grad/x"][:, 3]).norm()
    assert 1e-4 < float(off / found["grad/x"][:, 3].norm()) < 1e-1
    _, closer = case_of(write, tmp_path, "e / tl.sum(e, axis=0)", closer=True)
    off = (closer["near_base/0/x"][:, 3].double() - closer["near/0/x"][:, 3]).norm()
    assert 1e-4 < float(off / found["grad/x"][:, 3].norm()) < 1e-1


@pytest.mark.parametrize("result", ["x - top", "x * top", "e / tl.sum(e, axis=0) + 1e-6 * top"])
def test_maximum_that_the_result_hangs_on__keeps_its_gradient(write, tmp_path: Path, result: str) -> None:
    _, found = case_of(write, tmp_path, result)
    assert relative(found["base/x"], found["grad/x"]) < 1e-6

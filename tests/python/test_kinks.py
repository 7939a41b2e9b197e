"""A kernel may be on either side of a kink by rounding: the oracle's moved evaluation takes the other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_agent import tensors
from kernel_agent.operations import oracle

# a + b is 0 but for rounding at every fourth element.
FORWARD = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 64}]


@triton.jit
def kink_kernel(a_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sum = tl.load(a_ptr + at, mask=at < n, other=0.0) + tl.load(b_ptr + at, mask=at < n, other=0.0)
    y = FUNCTION
    tl.store(y_ptr + at, y, mask=at < n)


@autodiff(inputs_require_grad=(0, 1))
def kink(a, b):
    y = torch.empty_like(a)
    kink_kernel[(triton.cdiv(a.numel(), 16),)](a, b, y, a.numel(), BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["N"], device=device, dtype=dtype)
    b = torch.randn(dims["N"], device=device, dtype=dtype)
    b[::4] = -a[::4] * (1 + 2.0**-23)
    return a, b
"""
FUNCTIONS = {
    "where": "tl.where(sum > 0, sum, 0.01 * sum)",
    "maximum": "tl.maximum(sum, 0.0)",
    "abs": "tl.abs(sum)",
    "clamp": "tl.clamp(sum, 0.0, 100.0)",
    "floor": "(sum - tl.floor(sum)) * (1.0 - sum + tl.floor(sum))",
    "ceil": "(tl.ceil(sum) - sum) * (1.0 - tl.ceil(sum) + sum)",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_kink__within_rounding__is_crossed_and_no_other(function: str, tmp_path: Path) -> None:
    path = tmp_path / "kink.py"
    path.write_text(FORWARD.replace("FUNCTION", FUNCTIONS[function]))
    case = {"id": 0, "dims": {"N": 64}, "seed": 5, "upstream": {"kind": "normal", "seed": 9}, "inputs": None}
    request = {"file": str(path), "device": "cpu", "target": "sm_90", "dtype": None, "fd": False}
    (made,) = oracle.run(request | {"cases": [case]}, tmp_path)["cases"]
    assert made["ok"], made.get("error")
    found = tensors.load(tmp_path / made["file"])
    crossed = (found["grad/a"] - found["jitter/a"]).abs() > 0.5 * found["grad/a"].abs() + 1e-3
    wanted = torch.zeros(64, dtype=torch.bool)
    wanted[::4] = True
    assert torch.equal(crossed, wanted)

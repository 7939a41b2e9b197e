"""A tape is named after the variable that it holds, and none is called what the host calls something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import assert_right, draft

WALK = '''"""States that are not stored: they are taped."""
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def walk_kernel(x_ptr, y_ptr, T, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(T):
        x = tl.load(x_ptr + t * N + cols, mask=cols < N, other=0.0)
        state = tl.sin(state) + x * state + x
        tl.store(y_ptr + t * N + cols, tl.cos(state), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def walk(x):
    T, N = x.shape
    y = torch.empty_like(x)
    walk_kernel[(triton.cdiv(N, 16),)](x, y, T, N, BLOCK=16)
    return y


SWEEP = [{"T": 5, "N": 37}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["T"], dims["N"], device=device, dtype=dtype),)
'''
DIMS = {"T": 5, "N": 37}


@pytest.mark.parametrize("name", ["state", "steps", "segment", "checkpoints"])
def test_variable_with_the_name_of_a_count__has_a_tape_of_another(tmp_path: Path, name: str) -> None:
    file = tmp_path / "walk.py"
    file.write_text(re.sub(r"\bstate\b", name, WALK))
    result = draft(file, DIMS)
    tape = f"tape_{name}" + "_" * (name != "state")
    assert f"tl.store({tape} + " in result["backward"]
    assert_right(file, result, [(DIMS, "normal"), ({"T": 1, "N": 16}, "normal")])

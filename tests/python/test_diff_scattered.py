"""Gradients in half of which a launch adds to few elements: those alone are cleared, and rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diff_support import assert_right, draft, edits_of, pair_text
from kernel_agent import forward

GATHER = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gather_kernel(w_ptr, idx_ptr, y_ptr, N, D, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(idx_ptr + token)
    w = tl.load(w_ptr + v * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * D + cols, w * w, mask=cols < D)


@autodiff(inputs_require_grad=(0,))
def gather(w, idx):
    N, D = idx.numel(), w.shape[1]
    y = torch.empty((N, D), device=w.device, dtype=torch.float32)
    gather_kernel[(N, triton.cdiv(D, 16))](w, idx, y, N, D, BLOCK=16)
    return y


SWEEP = [{"N": 4, "V": 100, "D": 20}]


def make_args(dims, device="cuda", dtype=torch.bfloat16):
    w = torch.randn(dims["V"], dims["D"], device=device, dtype=dtype)
    return w, torch.randint(0, dims["V"], (dims["N"],), device=device)
"""
DIMS = {"N": 4, "V": 100, "D": 20}
FEW = [(DIMS, "normal"), ({"N": 9, "V": 70, "D": 16}, "normal"), ({"N": 1, "V": 40, "D": 3}, "expanded")]
MANY = [({"N": 60, "V": 7, "D": 20}, "normal"), ({"N": 5, "V": 1, "D": 5}, "normal")]
BOUND = 0.01  # of one rounding to half


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(GATHER, tmp_path / "gather.py")


def launched(file: Path, result: dict[str, Any], dims: dict[str, int], dtype: torch.dtype) -> set[str]:
    """The kernels that a backward launches."""
    pair = file.with_name("pair.py")
    pair.write_text(pair_text(file.read_text(), result["backward"]))
    fwd = forward.load(pair)
    w, idx = fwd.module.make_args(dims, "cpu", dtype)
    y = getattr(fwd.module, result["entry"])(w.requires_grad_(), idx)
    names = set()

    def seen(launch):
        names.add(launch.fn.__name__)
        return launch.run()

    with forward.launch_intercept(seen):
        y.backward(torch.ones_like(y))
    return names


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_few_rows__are_cleared_and_rounded_alone(changed, dtype: str) -> None:
    file = changed()
    result = draft(file, DIMS, dtype=dtype)
    assert_right(file, result, FEW + MANY, BOUND, dtype)
    alone = {"gather_kernel_bwd_clear_w", "gather_kernel_bwd_round_w"}
    assert launched(file, result, DIMS, getattr(torch, dtype)) == {"gather_kernel_bwd", *alone}
    assert launched(file, result, MANY[0][0], getattr(torch, dtype)) == {"gather_kernel_bwd"}
    assert launched(file, result, DIMS, torch.float32) == {"gather_kernel_bwd"}


def test_one_row_of_many_programs__is_summed_once_in_float32(changed) -> None:
    """Of 200 summands of 1 and one of 256 a sum in bfloat16 would keep 256."""
    file = changed(("w * w", "w"))
    result = draft(file, DIMS, dtype="bfloat16")
    pair = file.with_name("pair.py")
    pair.write_text(pair_text(file.read_text(), result["backward"]))
    entry = getattr(forward.load(pair).module, result["entry"])
    w = torch.zeros(20_000, 16, dtype=torch.bfloat16, requires_grad=True)
    y = entry(w, torch.full((201,), 3))
    upstream = torch.ones_like(y)
    upstream[0] = 256
    y.backward(upstream)
    assert w.grad is not None and (w.grad[3] == 456).all() and w.grad.sum() == 456 * 16


def test_float32__has_sums_where_the_gradient_is(changed) -> None:
    file = changed()
    result = draft(file, DIMS, dtype="float32")
    assert "sums_for" not in result["backward"]
    assert_right(file, result, FEW + MANY)


def test_traced_call_that_adds_to_every_row__has_no_such_kernels(changed) -> None:
    file = changed()
    result = draft(file, MANY[0][0], dtype="bfloat16")
    assert "sums_for" not in result["backward"]
    assert_right(file, result, FEW + MANY, BOUND, "bfloat16")


STEPS = """    for step in range(COUNT):
      at = token * COUNT + step
      v = tl.load(idx_ptr + at, at < N, 0)
"""
WALKS = (
    ("    v = tl.load(idx_ptr + token)\n", STEPS),
    ("    w = tl.load", "      w = tl.load"),
    ("    tl.store(y_ptr + token * D + cols, w * w, mask=cols < D)",
     "      tl.store(y_ptr + at * D + cols, w * w, mask=(cols < D) & (at < N))"),
    ("(N, triton.cdiv(D, 16))", "(triton.cdiv(N, 3), triton.cdiv(D, 16))"),
    ("y, N, D, BLOCK=16", "y, N, D, 3, BLOCK=16"),
    ("y_ptr, N, D, BLOCK", "y_ptr, N, D, COUNT, BLOCK"),
)  # fmt: skip


def test_steps_of_a_loop__count_too(changed) -> None:
    file = changed(*WALKS)
    result = draft(file, DIMS, dtype="bfloat16")
    assert "sums_for(w_ptr, BLOCK * grid[0] * grid[1] * COUNT)" in result["backward"]
    assert_right(file, result, FEW + MANY, BOUND, "bfloat16")


def test_steps_that_data_decides__are_not_counted(changed) -> None:
    ends = ("range(COUNT)", "range(tl.load(idx_ptr + token) % 3 + 1)")
    walks = ((old, new.replace(*ends)) for old, new in WALKS)
    file = changed(*walks, ("y = torch.empty(", "y = torch.zeros("))
    result = draft(file, DIMS, dtype="bfloat16")
    assert "sums_for" not in result["backward"]
    assert_right(file, result, FEW + MANY, BOUND, "bfloat16")


def test_two_places_in_one_row__are_both_cleared(changed) -> None:
    more = "w * w + tl.load(w_ptr + (v // 2) * D + cols, mask=cols < D, other=0.0).to(tl.float32)"
    file = changed(("w * w", more))
    result = draft(file, DIMS, dtype="bfloat16")
    assert result["backward"].count("tl.load(sums_w_ptr") == 2
    assert_right(file, result, FEW + MANY, BOUND, "bfloat16")


def test_branch__clears_where_it_adds(changed) -> None:
    other = "        w = tl.load(w_ptr + (v - 9) * D + cols, mask=cols < D, other=0.0).to(tl.float32)\n"
    file = changed(("    tl.store(y_ptr +", f"    if v > 10:\n{other}    tl.store(y_ptr +"))
    result = draft(file, DIMS, dtype="bfloat16")
    assert_right(file, result, FEW + MANY, BOUND, "bfloat16")

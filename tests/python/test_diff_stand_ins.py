"""A tensor that a flag leaves unread may be any other: the output stands in for an input that is None."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import assert_right, draft, pair_text
from kernel_agent import forward

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 50, "STATE": True}, {"N": 7, "STATE": False}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x, state = (torch.randn(3, dims["N"], device=device, dtype=dtype) for _ in range(2))
    return x, state[0] if dims["STATE"] else None


@triton.jit
def total_kernel(x_ptr, state_ptr, y_ptr, last_ptr, T, N, STATE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if STATE:
        total += tl.load(state_ptr + i, mask=i < N, other=0.0)
    for t in range(T):
        total += tl.load(x_ptr + t * N + i, mask=i < N, other=0.0)
        tl.store(y_ptr + t * N + i, total * total, mask=i < N)
    tl.store(last_ptr + i, total, mask=i < N)


@autodiff(inputs_require_grad=(0, 1))
def running_total(x, state=None, last=None):
    y = torch.empty_like(x)
    if last is None:
        last = torch.empty_like(x[0])
    first = last if state is None else state
    T, N = x.shape
    total_kernel[(triton.cdiv(N, 16),)](x, first, y, last, T, N, STATE=state is not None, BLOCK=16)
    return y, last
"""
GIVEN, NONE = {"N": 50, "STATE": True}, {"N": 7, "STATE": False}


@pytest.mark.parametrize("dims, others", [(GIVEN, [NONE]), (NONE, [GIVEN])])
def test_output_that_stands_in_for_an_input__is_no_access_in_place(
    dims: dict, others: list[dict], write: Callable[[str], Path]
) -> None:
    file = write(SOURCE)
    result = draft(file, dims, case={"dims": dims, "seed": 1, "others": others})
    assert_right(file, result, [(GIVEN, "normal"), (NONE, "normal"), ({**NONE, "N": 40}, "normal")])
    fwd = forward.load(write(pair_text(SOURCE, result["backward"])))
    x, state = torch.randn(3, 50), torch.randn(50)
    with fwd.active(), pytest.raises(NotImplementedError, match="writes to what it also reads"):
        getattr(fwd.module, fwd.entry_name)(x.requires_grad_(), state, state)

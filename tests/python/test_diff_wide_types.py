"""A type to compute in that a branch chooses by the tensor's own: the backward computes in it too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, errors

FORWARD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


{helper}
@triton.jit
def norm_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
{choice}
    cols = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + cols
    x = tl.load(x_ptr + at, mask=cols < N, other=0.0).to(wide)
    total = tl.zeros([BLOCK], dtype=wide) + x * x
    y = x / tl.sqrt(tl.sum(total, axis=0) / N + 1.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def norm(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=32)
    return y
"""
BRANCH = """\
    if tl.constexpr(x_ptr.dtype.element_ty == tl.float16) or tl.constexpr(
        x_ptr.dtype.element_ty == tl.bfloat16
    ):
        wide = tl.float32
    else:
        wide = x_ptr.dtype.element_ty
"""
HELPER = """\
def wide_of(own, least=32):
    return tl.float32 if own.primitive_bitwidth < least else own
"""
ASKED = "    wide: tl.constexpr = wide_of(x_ptr.dtype.element_ty)"
WAYS = {
    "branch": ("", BRANCH),
    "function": ("@triton.constexpr_function\n" + HELPER, ASKED),
    "constant function": ("@tl.constexpr\n" + HELPER, ASKED),
}
LIMITS = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 8e-3, "float16": 1e-3}


@pytest.mark.parametrize("traced", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("way", WAYS)
def test_type_chosen_by_a_tensor_s_own__is_the_wider_one(
    way: str, traced: str, write: Callable[[str], Path]
) -> None:
    helper, choice = WAYS[way]
    file = write(FORWARD.replace("{helper}", helper).replace("{choice}", choice))
    backward = draft(file, {"M": 5, "N": 20}, dtype=traced)["backward"]
    for dtype, limit in LIMITS.items() if traced != "float64" else [("float64", 1e-12)]:
        if dtype == "float64" and traced != "float64":
            continue
        found = errors(file, backward, [({"M": 5, "N": 20}, "normal"), ({"M": 3, "N": 32}, "normal")], dtype)
        assert max(found["x"]) < limit, (dtype, found)


def test_type_that_a_function_gives_back__stays_the_tensor_s_own(write: Callable[[str], Path]) -> None:
    """A backward that was drafted in bfloat16 does not compute in bfloat16 for ever."""
    helper = "@tl.constexpr\ndef wide_of(own):\n    return own\n"
    file = write(FORWARD.replace("{helper}", helper).replace("{choice}", ASKED))
    backward = draft(file, {"M": 5, "N": 20}, dtype="bfloat16")["backward"]
    assert "bfloat16" not in backward
    found = errors(file, backward, [({"M": 5, "N": 20}, "normal"), ({"M": 3, "N": 32}, "normal")])
    assert max(found["x"]) < LIMITS["float32"], found


TINY = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 40}]
LEAST: tl.constexpr = tl.constexpr(1e-40)


def make_args(dims, device="cuda", dtype=torch.float32):
    return tuple(torch.randn(dims["N"], 16, device=device, dtype=dtype) for _ in range(2))


@triton.jit
def score_kernel(q_ptr, k_ptr, y_ptr, N, BLOCK: tl.constexpr):
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, 16)
    at = rows[:, None] * 16 + cols[None, :]
    q = tl.load(q_ptr + at, mask=rows[:, None] < N, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + at, mask=rows[:, None] < N, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(rows[None, :] < N, tl.exp(tl.dot(q, tl.trans(k))), 0.0), axis=1)
    tl.store(y_ptr + rows, tl.log(GUARDED), mask=rows < N)


@autodiff(inputs_require_grad=(0, 1))
def score(q, k):
    y = torch.empty_like(q[:, 0])
    score_kernel[(1,)](q, k, y, q.shape[0], BLOCK=64)
    return y
"""


@pytest.mark.parametrize(
    "guarded", ["tl.maximum(total, 1e-40)", "tl.maximum(LEAST, total)", "tl.clamp(total, 1e-40, 1e40)"]
)
def test_number_beyond_float32__makes_float64_of_what_it_is_compared_with(
    guarded: str, write: Callable[[str], Path]
) -> None:
    """As Triton does: its adjoint is of float32 again before it comes to a dot."""
    file = write(TINY.replace("GUARDED", guarded))
    result = draft(file, {"N": 40})
    assert_right(file, result, [({"N": n}, "normal") for n in (40, 7)])

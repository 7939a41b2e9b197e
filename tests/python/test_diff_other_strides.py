"""Strides that another size of SWEEP has, of which the traced call says nothing: a bias that is expanded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 20, "rows": 5}, {"M": 18, "N": 7, "rows": 1}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shapes = (dims["M"], dims["N"]), (dims["rows"], dims["N"])
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


@triton.jit
def added_kernel(x_ptr, b_ptr, y_ptr, N, stride_x, stride_b, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < N, other=0.0)
    b = tl.load(b_ptr + row * stride_b + cols, mask=cols < N, other=0.0)
    tl.store(y_ptr + row * N + cols, x * b, mask=cols < N)


@autodiff(inputs_require_grad=(0, 1))
def added(x, b):
    (M, N), y = x.shape, torch.empty_like(x)
    stride_b = b.stride(0) if b.shape[0] > 1 else 0
    added_kernel[(M,)](x, b, y, N, x.stride(0), stride_b, BLOCK=32)
    return y
"""


def test_stride_that_is_zero_for_another_size__is_no_row_of_its_own(write: Callable[[str], Path]) -> None:
    file = write(SOURCE)
    rows, one = {"M": 5, "N": 20, "rows": 5}, {"M": 18, "N": 7, "rows": 1}
    alone = draft(file, rows)
    assert alone["report"]["atomics"] == 0 and "disjoint((stride_b" in alone["backward"]
    known = draft(file, rows, case={"dims": rows, "seed": 1, "others": [rows, one]})
    assert (
        known["report"]["atomics"] == 1
        and "d_b_ptr + " in known["backward"].partition("tl.atomic_add(")[2][:40]
    )
    assert_right(file, known, [(rows, "normal"), (one, "normal")])

"""Stores of the backward where sizes are no multiples of anything, and where an index is data: right, or
atomic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft

PICK = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"M": 4, "N": 20}}]


@triton.jit
def pick_kernel(x_ptr, index_ptr, y_ptr, n):
    row = tl.program_id(0)
    index = tl.load(index_ptr + row)
    tl.store(y_ptr + row, tl.load(x_ptr + row * n + {index}, mask={mask}, other=0.0))


@autodiff(inputs_require_grad=(0,))
def pick(x, index):
    y = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    pick_kernel[(x.shape[0],)](x, index, y, x.shape[1])
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    index = torch.randint(0, dims["N"], (dims["M"],), device=device)
    index[0], index[1] = dims["N"] - 1, -1  # both are one element
    return x, index
"""


def test_chunks_of_a_row__are_stored_whatever_the_last_one_lacks() -> None:
    file = ROOT / "tests/python/kernels/chunked_cross_entropy.py"
    shapes = [{"M": m, "N": n} for m, n in ((4, 150), (17, 151), (3, 100), (2, 7), (3, 4), (1, 1))]
    result = draft(file, shapes[0])
    kernel = result["backward"].split("def loss_kernel_bwd")[0]
    assert "tl.store(d_x_ptr" in kernel
    assert "atomic" not in kernel.split("# indices")[1]
    assert_right(file, result, [(dims, "normal") for dims in shapes])


@pytest.mark.parametrize(
    ("index", "mask", "atomics"),
    [
        ("index", "index < n", 1),
        ("index % n", "row < 100", 1),
        ("index", "(index >= 0) & (index < n)", 0),
        ("index", "(0 <= index) & (index < n)", 0),
    ],
)
def test_index_from_data__is_stored_to_where_it_cannot_leave_its_row(
    index: str, mask: str, atomics: int, write: Callable[..., Path]
) -> None:
    """A negative index reaches the row before, which belongs to another program."""
    file = write(PICK.format(index=index, mask=mask))
    shapes = [{"M": 4, "N": 20}, {"M": 5, "N": 3}]
    result = draft(file, shapes[0])
    assert result["report"]["atomics"] == atomics
    assert_right(file, result, [(dims, "normal") for dims in shapes])
    if index == "index" and atomics:
        reason = next(line["reason"] for line in result["report"]["lines"] if line["class"] == "atomic")
        assert "nothing bounds `index`" in reason

"""Programs that walk a stretch of rows each and store every row: a few sum what all add to."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of
from kernel_agent.differentiate.operation import Refused

FORWARD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"B": 2, "M": 70, "N": 20, "D": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, M, N, D = (dims[n] for n in ("B", "M", "N", "D"))
    return tuple(torch.randn(B, n, D, device=device, dtype=dtype) for n in (M, N, N))


@triton.jit
def stretch_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, M, N, D,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    b = tl.program_id(1)
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask = (n[:, None] < N) & (d[None, :] < D)
    k = tl.load(k_ptr + b * N * D + n[:, None] * D + d[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + b * N * D + n[:, None] * D + d[None, :], mask=mask, other=0.0)
    begin = tl.program_id(0) * SPLIT
    for start in range(begin, tl.minimum(begin + SPLIT, M), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m[:, None] < M) & (d[None, :] < D)
        rows = b * M * D + m[:, None] * D + d[None, :]
        q = tl.load(q_ptr + rows, mask=inside, other=0.0)
        s = tl.sin(tl.dot(q, tl.trans(k), input_precision="ieee"))
        tl.store(o_ptr + rows, tl.dot(s, v, input_precision="ieee"), mask=inside)


@autodiff(inputs_require_grad=(0, 1, 2))
def stretches(q, k, v):
    (B, M, D), N = q.shape, k.shape[1]
    o = torch.empty_like(q)
    stretch_kernel[(triton.cdiv(M, 32), B)](
        q, k, v, o, M, N, D, SPLIT=32, BLOCK_M=16, BLOCK_N=32, BLOCK_D=16
    )
    return o
"""
DIMS = {"B": 2, "M": 70, "N": 20, "D": 16}
CASES = [(DIMS, "normal"), ({"B": 1, "M": 30, "N": 3, "D": 9}, "normal")]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(FORWARD, tmp_path / "stretches.py")


@pytest.mark.parametrize("schedule", [None, "owner", "atomic"])
def test_stretches_of_rows(changed, schedule: str | None) -> None:
    result = draft(changed(), DIMS, schedule=schedule)
    report = result["report"]
    assert not any("could not be written" in line["reason"] for line in report["lines"])
    assert report["schedule"] == (schedule or "partials")
    assert report["atomics"] == (2 if schedule == "atomic" else 0)
    assert "disjoint((SPLIT * D, grid[0]), (D, BLOCK_M * triton.cdiv(SPLIT, BLOCK_M)))" in result["backward"]
    assert_right(changed(), result, CASES)


def test_stretches_whose_last_block_reaches_into_the_next__are_refused(changed) -> None:
    file = changed(("begin + SPLIT, M), BLOCK_M)", "begin + SPLIT, M), 24)"), ("BLOCK_M=16", "BLOCK_M=32"))
    with pytest.raises(Refused, match="stored to at one address by several"):
        draft(file, DIMS)

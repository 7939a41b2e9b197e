"""Sums in registers beside gradients at places that data says: offered, as all is then loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

GATHER = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def gather_kernel(x_ptr, w_ptr, idx_ptr, y_ptr, E, D, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr):
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (e[:, None] < E) & (d[None, :] < D)
    idx = tl.load(idx_ptr + e, mask=e < E, other=0)
    w = tl.load(w_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + idx[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + e[:, None] * D + d[None, :], tl.exp(0.1 * x) * w[:, None], mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def gather(x, w, idx):
    E, D = idx.numel(), x.shape[1]
    y = torch.empty((E, D), device=x.device, dtype=x.dtype)
    gather_kernel[(triton.cdiv(E, 8), triton.cdiv(D, 16))](x, w, idx, y, E, D, BLOCK_E=8, BLOCK_D=16)
    return y


SWEEP = [{"C": 7, "E": 29, "D": 40}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["C"], dims["D"], device=device, dtype=dtype)
    idx = torch.randint(0, dims["C"], (dims["E"],), device=device)
    return x, torch.randn(dims["E"], device=device, dtype=dtype), idx
"""
DIMS = {"C": 7, "E": 29, "D": 40}
OTHERS = [(DIMS, "normal"), ({"C": 3, "E": 5, "D": 7}, "normal"), ({"C": 30, "E": 64, "D": 16}, "normal")]
WALKS = {"walks": 1}


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(GATHER, tmp_path / "gather.py")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sum_beside_a_scatter__is_offered_in_one_kernel(changed, dtype: str) -> None:
    file = changed()
    plain = draft(file, DIMS, dtype=dtype)
    assert WALKS in plain["report"]["configs"] and "gather_kernel_bwd_w" in plain["backward"]
    result = draft(file, DIMS, dtype=dtype, config=WALKS)
    text = result["backward"]
    assert "gather_kernel_bwd_w" not in text and text.count("tl.load(d_y_ptr") == 1
    assert "tl.atomic_add(d_x_ptr" in text and "d_w_sum +=" in text
    assert_right(file, result, OTHERS, 1e-5 if dtype == "float32" else 4e-3, dtype)


ALONE = {
    "a scatter alone": ("(0, 1))\ndef", "(0,))\ndef"),
    "a sum alone": ("(0, 1))\ndef", "(1,))\ndef"),
}


@pytest.mark.parametrize("edit", ALONE.values(), ids=ALONE)
def test_what_has_no_other_beside_it__is_not_offered(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert WALKS not in result["report"]["configs"]
    assert draft(file, DIMS, config=WALKS)["backward"] == result["backward"]


def test_one_gradient_at_both_kinds_of_places__is_not_summed(changed) -> None:
    file = changed(
        (
            "tl.exp(0.1 * x) * w[:, None]",
            "tl.exp(0.1 * x) * w[:, None] + tl.load(x_ptr + d, mask=d < D, other=0.0)[None, :]",
        )
    )
    assert_right(file, draft(file, DIMS, config=WALKS), OTHERS)

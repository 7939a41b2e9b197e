"""One element of a row, folded into the write of the block that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diff_support import ROOT, assert_right, draft, pair_text
from kernel_agent.forward import load

FILE = ROOT / "examples/cross_entropy.py"
SHAPES = [{"M": 9, "V": 4999}, {"M": 3, "V": 7}, {"M": 2, "V": 4096}]


def test_cross_entropy__stores_the_target_with_its_block() -> None:
    result = draft(FILE, SHAPES[0])
    backward = result["backward"]
    assert "atomic_add" not in backward and backward.count("[grid](") == 2, (
        "the forward's launch, and one more"
    )
    assert "tl.where(cols == target" in backward
    assert (result["report"]["atomics"], result["report"]["atomics_naive"]) == (0, 2)
    assert_right(FILE, result, [(dims, "normal") for dims in SHAPES])


def test_index_outside_of_its_row__makes_the_row_nan(tmp_path: Path) -> None:
    pair = tmp_path / "pair.py"
    pair.write_text(pair_text(FILE.read_text(), draft(FILE, SHAPES[1])["backward"]))
    fwd = load(str(pair), "interpret", "sm_90", "cpu")
    logits = torch.randn(3, 7, requires_grad=True)
    with fwd.active():
        loss = fwd.module.cross_entropy_autograd(logits, torch.tensor([2, 9, 0]))
        loss.sum().backward()
    assert logits.grad is not None
    assert logits.grad[1].isnan().all() and logits.grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "edit",
    {
        "another row": ("logits_ptr + target)", "logits_ptr + row_stride + target)"),
        "a condition of its own": (
            "logits_ptr + target)",
            "logits_ptr + target, mask=target < V, other=0.0)",
        ),
        "blocks that leave columns out": ("mask=cols < V,", "mask=(cols < V) & (cols > 2),"),
        "columns that begin later": ("range(0, V, BLOCK)", "range(3, V, BLOCK)"),
    }.values(),
)
def test_element_that_may_be_in_no_block_of_the_row__stays_apart(
    tmp_path: Path, edit: tuple[str, str]
) -> None:
    text = FILE.read_text()
    assert edit[0] in text
    file = tmp_path / "changed.py"
    file.write_text(text.replace(*edit))
    assert 'float("nan")' not in draft(file, SHAPES[1])["backward"]

"""A softmax's factor of a row is multiplied in behind the products: what is loaded is their operand."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft, edits_of

ATTENTION = ROOT / "examples/attention.py"
TRACED = {"B": 1, "H": 2, "N": 65, "D": 16, "causal": True}
RAGGED = [
    ({"B": 1, "H": 2, "N": n, "D": 24, "causal": causal}, layout)
    for n, causal, layout in ((130, True, "normal"), (33, False, "slice"), (65, True, "normal"))
]


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(ATTENTION.read_text(), tmp_path / "attention.py")


def moved(result: dict) -> bool:
    return any(line["class"] == "factor" for line in result["report"]["lines"])


def test_upstream__is_an_operand_as_it_was_loaded() -> None:
    result = draft(ATTENTION, TRACED)
    tiles = (
        result["backward"].split("def attention_kernel_bwd_v_k(")[1].split("def attention_kernel_saving")[0]
    )
    assert moved(result)
    assert "d = tl.load(d_o_ptr + q_offs, mask=in_rows, other=0.0).to(v_ptr.dtype.element_ty)" in tiles
    assert "row_sum" not in tiles.split("# indices")[1].replace("d_row_sum", "")
    assert_right(ATTENTION, result, RAGGED)


def test_rows_without_upstream__have_no_part_whatever_they_are_divided_by(changed) -> None:
    """Rows that see nothing divide by zero, and are not stored."""
    file = changed(
        ("visible = cols[None, :] < N\n", "visible = (cols[None, :] < N) & (offs_m[:, None] > 2)\n"),
        ('row_max = tl.full([BLOCK_M], -float("inf")', "row_max = tl.full([BLOCK_M], -1.0e30"),
        ("        mask=in_rows,\n", "        mask=in_rows & (offs_m[:, None] > 2),\n"),
        ("o = torch.empty_like(q)", "o = torch.zeros_like(q)"),
    )
    result = draft(file, TRACED)
    assert moved(result)
    assert_right(file, result, RAGGED)


SUM = "row_sum = row_sum * correction + "
PRODUCT = "acc = tl.dot(p.to(v.dtype), v,"


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "a factor of more than the sum": (SUM, f"{SUM}0.5 * "),
        "weights that are no part of the sum": (PRODUCT, PRODUCT.replace("p.to", "(p * p).to")),
    }.values(),
)
def test_other_factors__stay_in_front_of_products(changed, old: str, new: str) -> None:
    file = changed((old, new))
    result = draft(file, TRACED)
    assert not moved(result)
    assert_right(file, result, RAGGED[:1])

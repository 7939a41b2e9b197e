"""Exact products of float32, as three products in TF32 each."""

from __future__ import annotations

from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of

MATMUL = ROOT / "examples/matmul.py"
DIMS = {"M": 70, "N": 50, "K": 45, "leaky": True}
CASES = [(DIMS, "normal"), ({"M": 33, "N": 17, "K": 90, "leaky": False}, "normal")]
THREE = {"tf32x3": 1}
EXACT = 'input_precision="ieee"'


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(MATMUL.read_text(), tmp_path / "matmul.py", once=False)


def offers(result: dict) -> bool:
    return THREE in result["report"]["configs"]


@pytest.fixture
def forward_of(tmp_path: Path):
    """Writes the forward of a pair."""

    def make(name: str) -> Path:
        file = ROOT / "dataset" / name
        return edits_of(file.read_text().partition(MARKER)[0], tmp_path / file.name)()

    return make


def test_exact_products__are_offered_as_three_before_all_else(forward_of) -> None:
    """A variant has what the best one has, so that tiles are then tried with it."""
    report = draft(forward_of("transform_fft/dct2_rows_matmul.py"), {"M": 70, "N": 40})["report"]
    assert report["configs"][0] == THREE


def test_variant__has_no_exact_product_of_float32_left(forward_of) -> None:
    forward, dims = forward_of("transform_fft/dct2_rows_matmul.py"), {"M": 70, "N": 40}
    plain, made = draft(forward, dims), draft(forward, dims, config={**THREE, "operands": 1})
    assert EXACT in plain["backward"]
    assert 'input_precision="tf32x3"' in made["backward"] and EXACT not in kernels(made)
    assert "# - products of float32 are three of TF32 each" in made["backward"]
    assert not offers(made)
    assert_right(forward, made, [(dims, "normal"), ({"M": 5, "N": 64}, "normal")])


def kernels(result: dict) -> str:
    """The text of the backward's own kernels: not that of a forward that saves something."""
    return "".join(part for part in result["backward"].split("@triton.jit\n") if "_bwd" in part[:80])


def test_products_of_halves__stay_as_they_are(forward_of) -> None:
    forward = forward_of("loss/info_nce_clip_symmetric.py")
    dims = {"M": 37, "D": 24}
    half = draft(forward, dims, dtype="bfloat16")
    assert EXACT in half["backward"] and not offers(half)
    assert draft(forward, dims, dtype="bfloat16", config=THREE)["backward"] == half["backward"]
    assert offers(draft(forward, dims))


def test_forward_that_wants_tf32__has_it(changed) -> None:
    forward = changed((EXACT, 'input_precision="tf32"'))
    result = draft(forward, DIMS)
    assert not offers(result) and offers(draft(MATMUL, DIMS))
    assert draft(forward, DIMS, config=THREE)["backward"] == result["backward"]


def test_variant_with_owners_of_both_gradients__is_right() -> None:
    result = draft(MATMUL, DIMS, config={**THREE, "apart": 1})
    assert result["backward"].count('"tf32x3"') >= 2 and EXACT not in kernels(result)
    assert_right(MATMUL, result, CASES)

"""The dataset as a whole: its list is today's, and no pair is another's twin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import dataset

PAIR = '''"""y = x.

op: {op}
schedule: same_tile_pointwise
difficulty: 1
dtypes: fp32
"""

# ---- backward ----


@triton.jit
def {kernel}({x}_ptr, N, BLOCK: tl.constexpr):
    """Of {x}."""
    at = tl.program_id(0) * {block} + tl.arange(0, BLOCK)
    tl.{store}({x}_ptr + at, {value}, mask=at < N)
'''
PLAIN = {"op": "copy", "kernel": "f", "x": "x", "block": "BLOCK", "store": "store", "value": "1.0"}


def write(folder: Path, name: str, **changes: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(PAIR.format(**{**PLAIN, **changes}))
    return path


def test_list__is_what_the_files_say() -> None:
    assert dataset.README.read_text() == dataset.with_list(dataset.README.read_text(), dataset.pairs()), (
        "scripts/dataset.py list"
    )


def test_pairs__no_two_have_the_same_backward() -> None:
    assert dataset.twins(dataset.pairs()) == []


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"kernel": "g", "x": "other", "op": "move"}, True),
        ({"value": "2.0"}, True),
        ({"store": "atomic_add"}, False),
        ({"value": "at"}, False),
    ],
)
def test_twins__are_the_same_but_for_names_and_numbers(
    tmp_path: Path, changes: dict[str, str], same: bool
) -> None:
    one, other = write(tmp_path, "one"), write(tmp_path, "other", **changes)
    assert dataset.twins([one, other]) == ([(one, other)] if same else [])


def test_list__new_file_and_line_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    made = dataset.with_list(dataset.README.read_text(), [write(tmp_path / "new", "pair")])
    assert "There are 1 pairs in 1 families" in made and "## Departures from the plan" in made
    assert "| [pair](new/pair.py) | copy | same_tile_pointwise | fp32 | 1 |\n" in made
    with pytest.raises(ValueError, match="lacks op"):
        dataset.fields_of(write(tmp_path, "bad", op="\n"))

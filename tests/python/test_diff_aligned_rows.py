"""Tiles of the backward's own are for calls whose rows of halves are aligned; others have the forward's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from diff_support import MARKER, ROOT, assert_right, draft, edits_of, errors
from kernel_agent.differentiate.write import steps
from test_diff_own_tiles import MATMUL, SCALED, STORED, TWO_AXES

half = partial(draft, dtype="float16")  # as it is traced; it serves other dtypes too
Edits = tuple[tuple[str, str], ...]
Dims = dict[str, int | bool]

GROUPED = ROOT / "examples/grouped_gemm.py"
OWN = {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 16}
APART = {**OWN, "apart": 1}
TRACED: Dims = {"M": 70, "N": 48, "K": 64, "leaky": False}
ALIGNED: list[Dims] = [{**TRACED, "M": 130}, {**TRACED, "N": 144, "leaky": True}]
ELSE: list[Dims] = [{**TRACED, "N": 45}, {**TRACED, "K": 52, "leaky": True}]
CHOSEN = "        if ctx.tiles:\n"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    return edits_of(MATMUL.read_text(), tmp_path / "matmul.py", once=False)


@pytest.fixture(autouse=True)
def few_programs_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FILLED", 1)


def asked(result: dict) -> list[str]:
    """The strides that a call is asked for."""
    words = result["backward"].replace("(", " ").split()
    return [words[at - 1] for at, word in enumerate(words) if words[at : at + 4] == ["%", "16", "==", "0"]]


def assert_chosen(file: Path, result: dict, aligned: list[Dims], others: list[Dims]) -> None:
    """Both give the right gradients, and only calls that are aligned have tiles of the backward's own."""
    assert_right(file, result, [(dims, "normal") for dims in (*aligned, *others)])
    backward = result["backward"]
    assert CHOSEN in backward
    stopped = backward.replace(CHOSEN, f'{CHOSEN}            raise RuntimeError("tiles of its own")\n', 1)
    assert_right(file, {"backward": stopped}, [(dims, "normal") for dims in others])
    for dims in aligned:
        with pytest.raises(Exception, match="tiles of its own"):
            errors(file, stopped, [(dims, "normal")])


@pytest.mark.parametrize("config", [OWN, APART, {**APART, "saved": 1}])
@pytest.mark.parametrize("edits", [(), TWO_AXES, SCALED], ids=["swizzled", "two axes", "another gradient"])
def test_calls_with_aligned_rows_alone__have_tiles_of_their_own(changed, edits: Edits, config: dict) -> None:
    relu = (STORED, "tl.where(acc > 0, acc, 0.1 * acc).to(c_ptr.dtype.element_ty)")
    file = changed(*edits, *[relu] * ("saved" in config))
    result = half(file, TRACED, config=config)
    assert asked(result) == ["stride_am", "stride_bk", "stride_cm"]
    assert_chosen(file, result, ALIGNED, ELSE)


def test_rows_of_float32__may_lie_anywhere() -> None:
    """Each element is copied by itself there, and still a large tile is faster than a small one."""
    result = draft(MATMUL, TRACED, config=APART)
    assert asked(result) == [] and "ctx.tiles" in result["backward"]
    assert_right(MATMUL, result, [(dims, "normal") for dims in (*ALIGNED, *ELSE)])
    assert asked(half(MATMUL, TRACED, config=APART)) != []


def test_draft_without_a_configuration__asks_for_nothing() -> None:
    result = half(MATMUL, TRACED)
    assert asked(result) == [] and "ctx.tiles" not in result["backward"]


def test_column_that_lies_in_memory_as_a_row__is_no_stride_to_be_asked_for(changed) -> None:
    """B is given as its transpose is laid out: numbers along K are neighbours."""
    file = changed(
        ('torch.randn(dims["K"], dims["N"]', 'torch.randn(dims["N"], dims["K"]'),
        ("def matmul(a, b, activation=None):\n", "def matmul(a, b, activation=None):\n    b = b.t()\n"),
        ("    c = a @ b\n", "    c = a @ b.t()\n"),
    )
    result = half(file, TRACED, config=APART)
    assert asked(result) == ["stride_am", "stride_bn", "stride_cm"]
    assert_chosen(file, result, ALIGNED, ELSE)


OPTIONS = {**APART, "num_warps": 8, "num_stages": 4}


def test_calls_with_the_forwards_tiles__have_its_warps_and_stages(changed) -> None:
    """Those that it passes, or those that Triton takes, where it passes none."""
    passed = half(MATMUL, TRACED, config=OPTIONS)
    alone = half(changed(("        num_warps=4, num_stages=3,\n", "")), TRACED, config=OPTIONS)
    fewer = half(changed(("num_stages=3", "num_stages=2")), TRACED, config=OPTIONS)
    before = {
        "        num_stages = 3\n": passed,
        "        num_warps, num_stages = 4, 3\n": alone,
        "        ))  # fmt: skip\n        # blocks of": fewer,
    }
    for text, result in before.items():
        launched = result["backward"].split("def backward(")[1]
        assert (
            text in result["backward"] and "            num_warps, num_stages = 8, 4\n" in result["backward"]
        )
        assert launched.count("num_warps=num_warps, num_stages=num_stages") == 3
        assert "num_warps=8" not in launched
    file = changed()
    assert_chosen(file, passed, ALIGNED, ELSE)


def test_options_that_the_forward_has_too__are_numbers() -> None:
    result = half(MATMUL, TRACED, config={**APART, "num_warps": 4, "num_stages": 3})
    assert result["backward"].split("def backward(")[1].count("num_warps=4, num_stages=3") == 3


def test_tiles_of_a_queue__are_for_aligned_rows_alone() -> None:
    dims = {"G": 3, "M": 70, "N": 48, "K": 32}
    for config in (OWN, APART):
        result = half(GROUPED, dims, config=config)
        assert asked(result) == ["N", "K"]
        assert_chosen(GROUPED, result, [dims], [{**dims, "N": 50}, {**dims, "K": 36}])


def test_groups_of_packed_weights__are_aligned_if_each_is(tmp_path: Path) -> None:
    packed = ROOT / "dataset/quantised_ste/int4_packed_groupwise_linear.py"
    file = edits_of(packed.read_text().partition(MARKER)[0], tmp_path / packed.name)()
    dims = {"M": 70, "groups": 2, "size": 32, "N": 48}
    result = half(file, dims, config={"BLOCK_M": 64, "BLOCK_N": 16})
    assert asked(result) == ["N", "K", "SIZE"]
    assert_chosen(file, result, [dims], [{**dims, "size": 24}, {**dims, "N": 50}])

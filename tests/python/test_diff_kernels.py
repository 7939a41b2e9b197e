"""Whole forward files: the drafted backward equals the oracle's gradient, on the traced shape and on
others."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from diff_support import ROOT, assert_right, draft
from kernel_agent import forward

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "softmax": [{"M": 3, "N": 37}, {"M": 1, "N": 1}, {"M": 2, "N": 65}],
    "swiglu": [{"B": 2, "T": 3, "F": 700}, {"B": 1, "T": 1, "F": 1}],
    "rms_norm": [{"B": 2, "T": 3, "N": 45}, {"B": 1, "T": 1, "N": 3}],
    "layer_norm": [{"M": 3, "N": 1100}, {"M": 2, "N": 7}, {"M": 1, "N": 1025}],
    "cross_entropy": [{"M": 9, "V": 4999}, {"M": 3, "V": 7}],
    "matmul": [
        {"M": 70, "N": 50, "K": 45, "leaky": True},
        {"M": 130, "N": 65, "K": 33, "leaky": False},
        {"M": 1, "N": 1, "K": 1, "leaky": True},
    ],
    "attention": [
        {"B": 1, "H": 2, "N": 70, "D": 20, "causal": True},
        {"B": 2, "H": 1, "N": 33, "D": 16, "causal": False},
    ],
    "linear_recurrence": [
        {"B": 2, "T": 5, "D": 70, "gate": True, "h0": False},
        {"B": 2, "T": 4, "D": 20, "gate": True, "h0": True},
        {"B": 1, "T": 1, "D": 9, "gate": False, "h0": False},
    ],
    "grouped_gemm": [{"G": 2, "M": 90, "N": 40, "K": 36}, {"G": 3, "M": 7, "N": 5, "K": 1}],
}
KERNELS = sorted(p.stem for p in (ROOT / "tests/python/kernels").glob("*.py"))


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example__gradients_equal_the_oracles(name: str) -> None:
    file = ROOT / "examples" / f"{name}.py"
    cases = EXAMPLES[name]
    result = draft(file, cases[0])
    kinds = ["normal", "transposed", "expanded"]
    assert_right(file, result, [(dims, kinds[i % 3]) for i, dims in enumerate(cases)])


@pytest.mark.parametrize("schedule", ["atomic", "owner", "partials"])
@pytest.mark.parametrize("name", ["layer_norm", "matmul", "attention"])
def test_example__every_schedule_is_right(name: str, schedule: str) -> None:
    file = ROOT / "examples" / f"{name}.py"
    dims = EXAMPLES[name][0]
    result = draft(file, dims, schedule=schedule)
    assert result["report"]["schedule"] == schedule
    assert (result["report"]["atomics"] > 0) == (schedule == "atomic")
    assert_right(file, result, [(dims, "normal")])


@pytest.mark.parametrize("name", KERNELS)
def test_kernel__gradients_equal_the_oracles(name: str) -> None:
    file = ROOT / "tests/python/kernels" / f"{name}.py"
    sweep = forward.load(file).sweep
    result = draft(file, sweep[0].dims)
    assert_right(file, result, [(shape.dims, "normal") for shape in sweep])


def test_attention__has_no_tape_and_no_atomics() -> None:
    file = ROOT / "examples/attention.py"
    for causal in (True, False):
        report = draft(file, {"B": 1, "H": 2, "N": 70, "D": 20, "causal": causal})["report"]
        assert report["tape_bytes"] == 0
        assert report["tape_naive_bytes"] > 0
        assert report["atomics"] == 0
        assert any(line["class"] == "D" and line["proof"] == "shift invariance" for line in report["lines"])


def test_two_causal_stages__own_keys_and_values(tmp_path: Path) -> None:
    """Without grouped queries, the two inner calls of a causal kernel add into one owner kernel."""
    source = (ROOT / "tests/python/kernels/attention.py").read_text()
    changed = re.sub(r"    kv = .*", "    kv = head", source).replace('"KV": 1', '"KV": 2')
    assert changed != source
    file = tmp_path / "two_stages.py"
    file.write_text(changed)
    shapes = [
        {"B": 1, "H": 2, "KV": 2, "N": n, "D": 16, "CAUSAL": causal}
        for n, causal in ((70, True), (33, False))
    ]
    result = draft(file, shapes[0])
    assert (result["report"]["atomics"], result["report"]["tape_bytes"]) == (0, 0)
    assert_right(file, result, [(dims, "normal") for dims in shapes])


@pytest.mark.parametrize("name", ["linear_recurrence"])
def test_recurrence__reads_stored_states_back(name: str) -> None:
    report = draft(ROOT / "examples" / f"{name}.py", EXAMPLES[name][1])["report"]
    assert report["tape_bytes"] == 0 < report["tape_naive_bytes"]


def test_text__does_not_depend_on_the_precision() -> None:
    file = ROOT / "examples/matmul.py"
    half, single = (
        draft(file, EXAMPLES["matmul"][0], dtype=dtype)["backward"] for dtype in ("float16", "float32")
    )
    assert half == single


def test_output__imports_nothing_and_is_stable() -> None:
    file = ROOT / "examples/layer_norm.py"
    first, second = (draft(file, {"M": 3, "N": 40})["backward"] for _ in range(2))
    assert first == second
    tree = ast.parse(first)
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert max(len(line) for line in first.splitlines()) <= 120


def test_output__sections_come_in_order() -> None:
    text = draft(ROOT / "examples/softmax.py", {"M": 3, "N": 40})["backward"]
    titles = re.findall(r"^    # (indices|recompute|upstream|reverse|write gradients)$", text, re.MULTILINE)
    assert titles == ["indices", "upstream", "recompute", "reverse", "write gradients"]


def test_grouped_queries__own_keys_and_values() -> None:
    """A program owns a tile of one key head and loops over the queries heads of its group."""
    file = ROOT / "tests/python/kernels/attention.py"
    shapes = [
        {"B": 2, "H": 6, "KV": 2, "N": 40, "D": 16, "CAUSAL": True},
        {"B": 1, "H": 4, "KV": 4, "N": 33, "D": 16, "CAUSAL": False},
        {"B": 1, "H": 3, "KV": 1, "N": 97, "D": 16, "CAUSAL": True},
    ]
    result = draft(file, shapes[0])
    assert (result["report"]["atomics"], result["report"]["tape_bytes"]) == (0, 0)
    assert re.search(r"for \w+ in range\(per_kv\):", result["backward"])
    assert 'raise ValueError("heads must be a multiple of per_kv in the backward")' in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in shapes])


def test_causal_owner__starts_at_the_first_block_that_sees_it() -> None:
    file = ROOT / "examples/attention.py"
    shapes = [
        {"B": 1, "H": 2, "N": n, "D": 20, "causal": causal}
        for n, causal in ((70, True), (257, True), (1, True), (130, False))
    ]
    result = draft(file, shapes[0])
    owner = result["backward"].split("def attention_kernel_bwd_v_k")[1].split("\ndef ")[0]
    assert re.search(r"range\(start_n // BLOCK_M if CAUSAL else 0, grid_0\)", owner)
    assert "start_n <" not in owner  # no test is left inside the loop
    assert_right(file, result, [(dims, "normal") for dims in shapes])


def test_sliding_owner__leaves_out_the_blocks_beyond_the_window() -> None:
    file = ROOT / "tests/python/kernels/sliding_attention.py"
    owner = draft(file, forward.load(file).sweep[0].dims)["backward"].split("_bwd_v_k(")[1].split("\ndef ")[0]
    assert re.search(
        r"for \w+ in range\(first, last\):|for \w+ in range\(.+, tl.minimum\(grid_0, .+\)\):", owner
    )

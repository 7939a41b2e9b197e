"""Two results of check_all side by side."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import compare_verdicts


def test_compare__tells_equal_different_and_what_was_not_reached():
    good = {"verdict": "verified", "gradients": [{"name": "x", "error": 3e-7, "baseline_error": 1e-7}]}
    bad = {"verdict": "not_verified", "failures": "the gradient of x is\nwrong"}
    found = compare_verdicts.compare(
        {"a": good, "b": bad, "c": good, "d": good},
        {"a": good, "b": good, "c": {"verdict": "not reached"}},
    )
    assert found["same"] == [{"file": "a", "verdict": "verified", "error_over_eager": [3.0, 3.0]}]
    assert [(one["file"], one["reasons"][0]) for one in found["differ"]] == [
        ("b", "the gradient of x is wrong")
    ]
    assert [one["file"] for one in found["not_compared"]] == ["c", "d"]

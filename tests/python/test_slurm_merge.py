"""Parts of a batch become one summary; a part that left nothing is told."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from test_option_docs import ROOT


def write_part(out: Path, number: int, outcomes: dict[str, tuple[str, int]]) -> None:
    parts = out / "parts"
    parts.mkdir(exist_ok=True)
    files = [
        {"file": name, "outcome": outcome, "exit_code": code, "result": None, "reason": None}
        for name, (outcome, code) in outcomes.items()
    ]
    worst = max((code for _, code in outcomes.values()), default=0)
    doc = {"files": files, "exit_code": worst, "seconds": 1.5, "part": f"{number}/3"}
    (parts / f"{number}.json").write_text(json.dumps(doc))
    suites = "".join(f'<testsuite name="{name}"/>' for name in outcomes)
    (parts / f"{number}.xml").write_text(f"<testsuites>{suites}</testsuites>")


def merge(out: Path) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, ROOT / "scripts/slurm/merge.py", out, 3]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, json.loads((out / "summary.json").read_text())


def test_parts_are_merged_and_the_worst_code_is_the_summarys(tmp_path: Path) -> None:
    write_part(tmp_path, 1, {"c.py": ("verified", 0), "a.py": ("not_verified", 4)})
    write_part(tmp_path, 2, {"b.py": ("unchanged", 0)})
    write_part(tmp_path, 3, {})
    code, printed, summary = merge(tmp_path)
    assert code == summary["exit_code"] == 4 and summary["missing_parts"] == []
    assert [entry["file"] for entry in summary["files"]] == ["a.py", "b.py", "c.py"]
    assert summary["outcomes"] == {"verified": 1, "not_verified": 1, "unchanged": 1}
    assert "3 files in 3 parts: 1 not_verified, 1 unchanged, 1 verified" in printed
    suites = ET.parse(tmp_path / "summary.xml").getroot()
    assert [suite.attrib["name"] for suite in suites] == ["c.py", "a.py", "b.py"]


def test_part_that_left_nothing_or_half_of_it_is_told(tmp_path: Path) -> None:
    write_part(tmp_path, 1, {"a.py": ("verified", 0)})
    (tmp_path / "parts" / "3.json").write_text('{"files": [')
    code, printed, summary = merge(tmp_path)
    assert code == 1 and summary["missing_parts"] == [2, 3]
    assert "part 2 left nothing" in printed and "part 3 left nothing" in printed

"""A short soak: faults at the endpoint, a candidate that hangs, and kills of the service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import BUILD, ROOT


def test_short_soak_loses_and_doubles_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, ROOT / "tests/soak/run.py", "--build", BUILD, "--out", out]
    done = subprocess.run(
        [*map(str, command), "--runs", "6", "--kill-every", "15", "--deadline", "12", "--seconds", "1800"],
        capture_output=True,
        text=True,
        check=False,
    )
    result = json.loads(out.read_text())
    assert done.returncode == 0 and result["problems"] == [], result
    assert result["runs"] == 6 and sum(result["faults"].values()) == 3 and result["kills"] >= 1
    assert result["cancelled"] == 0

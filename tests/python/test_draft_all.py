"""scripts/draft_all.py with a program that judges a batch by what it is told of each file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """#!{python}
import json, pathlib, sys
told = json.loads(pathlib.Path({told!r}).read_text())
assert sys.argv[1] == "batch" and sys.argv[sys.argv.index("--dtype") + 1] == "bfloat16"
files = []
for path in sorted(pathlib.Path(sys.argv[2]).glob("*.py")):
    text = path.read_text()
    assert "# ---- backward" not in text and text.endswith("SWEEP = [*SWEEP_CPU[:1], SWEEP[-1]]\\n")
    found = [one for name, one in told.items() if path.stem.endswith(name)]
    files += [{{"file": str(path), **(found[0] if found else {{"outcome": "not begun"}})}}]
with open({log!r}, "a") as log:
    log.write("".join(pathlib.Path(one["file"]).stem[5:] + "\\n" for one in files))
print(json.dumps({{"files": files}}))
sys.exit(4)
"""
NAMES = ("softmax_row_single_tile", "layer_norm_linear_fused_input", "sparsemax_support_shrinking")
VERIFIED = {
    "verdict": "verified",
    "seconds": 1.25,
    "attempts": 2,
    "gradients": [{"error": 1e-3}, {"error": 2e-3}],
}
FAILED = {"verdict": "not_verified", "seconds": 2, "attempts": 1}
Call = Callable[..., tuple[int, str, dict[str, Any], list[str]]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    program, told, log = (tmp_path / name for name in ("program", "told.json", "log"))
    program.write_text(PROGRAM.format(python=sys.executable, told=str(told), log=str(log)))
    program.chmod(0o755)

    def make(outcomes: dict[str, Any], *options: str) -> tuple[int, str, dict[str, Any], list[str]]:
        told.write_text(json.dumps(outcomes))
        log.write_text("")
        command: list[object] = [sys.executable, ROOT / "scripts/draft_all.py", "--program", program]
        command += ["--out", tmp_path / "r.json", "--work", tmp_path / "work", "--device", "cpu"]
        command += ["--only", f"/({'|'.join(NAMES)})", *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        rows = json.loads((tmp_path / "r.json").read_text())["results"]
        return (
            done.returncode,
            done.stdout + done.stderr,
            {Path(r["file"]).stem: r for r in rows},
            log.read_text().split(),
        )

    return make


def ended(**result: Any) -> dict[str, Any]:
    return {"outcome": result["verdict"], "result": result}


def test_rows__say_what_was_verified_refused_and_rejected_and_why(call: Call) -> None:
    refused = ended(**FAILED, error={"kind": "unsupported_op", "message": "a while loop"})
    rejected = ended(**FAILED, failures="the gradient of x\n is wrong")
    code, said, rows, _ = call(dict(zip(NAMES, (ended(**VERIFIED), rejected, refused), strict=True)))
    assert code == 1 and "1 verified, 2 not, 0 had no turn" in said, said
    verified, wrong, unread = (rows[name] for name in NAMES)
    assert (verified["verdict"], verified["error"], verified["attempts"]) == ("verified", 2e-3, 2)
    assert (wrong["verdict"], wrong["reason"]) == ("not verified", "the gradient of x is wrong")
    assert (unread["verdict"], unread["reason"]) == ("refused", "a while loop")


def test_resume__judges_what_has_no_verdict_yet(call: Call) -> None:
    code, said, rows, _ = call({NAMES[0]: ended(**VERIFIED)})
    assert code == 0 and "1 verified, 0 not, 2 had no turn" in said and rows.keys() == {NAMES[0]}, said
    code, said, rows, asked = call({name: ended(**VERIFIED) for name in NAMES}, "--resume")
    assert code == 0 and set(asked) == set(NAMES[1:]) and rows.keys() == set(NAMES), said


def test_resume__rows_of_another_program_come_last(call: Call, tmp_path: Path) -> None:
    _, _, rows, asked = call({name: ended(**VERIFIED) for name in NAMES})
    assert len(set(asked)) == 3
    first = rows[asked[0]]
    older = {key: value for key, value in first.items() if key != "program"}
    (tmp_path / "r.json").write_text(json.dumps({"results": [older]}))
    _, _, _, again = call({name: ended(**VERIFIED) for name in NAMES}, "--resume")
    assert again == [*asked[1:], asked[0]]

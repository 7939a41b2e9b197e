"""scripts/bench_all.py with a program that makes a pair of each forward and says how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """#!{python}
import json, pathlib, sys
with open({cards!r}, "a") as log:
    log.write(sys.argv[sys.argv.index("--gpus") + 1] + "\\n" if "--gpus" in sys.argv else "")
if sys.argv[1] == "bench":
    text = pathlib.Path(sys.argv[2]).read_text()
    ratio = 0.5 if "SLOW" in text else 2.0
    peers = {{p: {{"ratio": ratio, "faster": 1, "slower": 0, "shapes": 1}} for p in ("eager", "compile")}}
    subjects = {{"ours": {{"graph": {{"median_ms": 1.0}}}}}}
    shape = {{"dims": {{"N": 8}}, "passes": {{"bwd": {{"floor_ms": 0.5, "subjects": subjects}}}}}}
    print(json.dumps({{"geomean": {{"bwd": {{"graph": peers, "alone": {{}}}}}}, "shapes": [shape]}}))
    sys.exit(0)
path = pathlib.Path(sys.argv[sys.argv.index("--file-path") + 1])
text = path.read_text()
assert "# ---- backward" not in text and "def reference(" in text
assert sys.argv[sys.argv.index("--max-seconds") + 1] == "225"  # of 300, so that it ends by itself
with open({log!r}, "a") as log:
    log.write(path.stem + "\\n")
if "REFUSED" in text:
    print(json.dumps({{"verdict": "not_verified", "error": {{"message": "a while loop"}}}}))
    sys.exit(4)
if "ENDED" in text:
    print("tuning", file=sys.stderr)
    print(json.dumps({{"verdict": "verified", "pair": None, "ms": 1.5, "attempts": 1}}))
    sys.exit(130)
pair = path.with_name("pair.py")
pair.write_text(text)
print(json.dumps({{"verdict": "verified", "pair": str(pair), "ms": 1.5, "attempts": 2}}))
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.log = folder, folder / "r.json", folder / "log"
        self.program = folder / "bin" / "program"
        self.program.parent.mkdir()
        self.cards = folder / "cards"
        text = PROGRAM.format(python=sys.executable, log=str(self.log), cards=str(self.cards))
        self.program.write_text(text)
        self.program.chmod(0o755)
        self.list = folder / "list.txt"
        self.list.write_text("# a comment\n" + "".join(f"{self.pair(name)}\n" for name in ("a", "b", "c")))

    def pair(self, name: str, text: str = "") -> Path:
        path = self.folder / f"{name}.py"
        path.write_text(f"def reference(x):\n    return x  # {text}\n\n\n# ---- backward ----\nx = 1\n")
        return path

    def call(self, *options: str) -> tuple[int, str]:
        self.log.write_text("")
        command = [
            sys.executable,
            ROOT / "scripts/bench_all.py",
            "--program",
            self.program,
            "--out",
            self.out,
        ]
        command += ["--list", self.list, "--work", self.folder / "work", "--only", str(self.folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def made(self) -> list[str]:
        return sorted(self.log.read_text().split())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_several_cards__each_run_and_each_bench_has_one(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert place.call()[0] == 0
    cards = place.cards.read_text().split()
    assert len(cards) == 6 and set(cards) <= {"3", "7"}


def test_geomean__is_over_files_and_counts_those_that_are_slower(place):
    place.pair("b", "SLOW")
    code, said = place.call("--jobs", "1")
    assert code == 0 and "3 timed, 0 without times" in said, said
    made = json.loads(place.out.read_text())
    assert made["geomean"]["compile"] == {"ratio": 1.26, "files": 3, "slower": 1}
    row = made["results"][0]
    assert row["tuned_ms"] == 1.5 and row["shapes"] == [
        {"dims": {"N": 8}, "floor_ms": 0.5, "ms": {"ours": 1.0}}
    ]


def test_file_that_is_listed_twice__is_made_and_timed_once(place):
    place.list.write_text(place.list.read_text() * 2)
    code, said = place.call("--jobs", "1")
    assert code == 0 and place.made() == ["a", "b", "c"] and "3 timed, 0 without times" in said, said


def test_refused__is_a_file_without_times_and_its_reason(place):
    place.pair("c", "REFUSED")
    code, said = place.call()
    assert code == 1 and "2 timed, 1 without times" in said and "a while loop" in said
    assert json.loads(place.out.read_text())["geomean"]["eager"]["files"] == 2


def test_run_that_was_ended__has_no_pair_to_time_and_its_log(place):
    place.pair("c", "ENDED")
    code, said = place.call()
    row = next(row for row in json.loads(place.out.read_text())["results"] if row["file"].endswith("c.py"))
    assert code == 1 and "no pair: " in said and row["log"] == ["tuning"] and "ratios" not in row


def test_resume__times_what_changed_and_what_had_no_turn(place):
    assert place.call("--budget", "-1")[0] == 1 and place.made() == [] and not place.out.exists()
    place.call()
    place.pair("a", "another")
    assert place.call("--resume")[0] == 0 and place.made() == ["a"]


def test_pairs_that_are_kept__are_timed_by_another_call_and_made_anew_where_the_text_changed(place):
    kept = ["--pairs", str(place.folder / "kept")]
    code, said = place.call(*kept, "--make-only")
    assert code == 0 and "3 made, 0 without a pair" in said and place.made() == ["a", "b", "c"], said
    assert "ratios" not in json.loads(place.out.read_text())["results"][0]
    place.pair("b", "SLOW")
    code, said = place.call(*kept, "--resume")
    assert code == 0 and "3 timed, 0 without times" in said and place.made() == ["b"], said
    assert json.loads(place.out.read_text())["results"][0]["tuned_ms"] == 1.5
    assert place.call("--make-only")[0] == 2 and place.made() == []
    place.program.write_text(place.program.read_text() + "# another\n")
    assert place.call(*kept)[0] == 0 and place.made() == ["a", "b", "c"]

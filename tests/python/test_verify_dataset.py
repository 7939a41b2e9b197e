"""scripts/verify_dataset.py with a program that says of each pair what the pair's text holds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bounded

PROGRAM = """#!{python}
import json, pathlib, sys, time
all_good = True
for path in map(pathlib.Path, sys.argv[2 : sys.argv.index("--json")]):
    text = path.read_text()
    with open({log!r}, "a") as log:
        card = sys.argv[sys.argv.index("--gpus") + 1] if "--gpus" in sys.argv else ""
        first = path == pathlib.Path(sys.argv[2])
        log.write(f"{{path.stem}} {{sys.argv[sys.argv.index('--dtype') + 1]}} {{card}}\\n")
    with open({log!r} + ".programs", "a") as log:
        log.write("program\\n" * first)
    if "WAIT" in text:
        time.sleep(1000)
    if "CRASH" in text:
        sys.exit("terminate called")
    good = "WRONG" not in text
    all_good = all_good and good
    shapes = {{"required": 2, "passed": 2 * good, "hidden": 3, "hidden_passed": 3}}
    result = {{"verdict": "verified" if good else "not_verified", "exit_code": 0 if good else 4}}
    result["file"] = str(path.with_name("other.py") if "OTHER" in text else path)
    result["shapes"] = shapes
    result["gradients"] = [{{"name": "x", "error": 1e-7 if good else None}}]
    result["failures"] = [] if good else ["x differs, {root}/dataset/x.py, line 3"]
    print(json.dumps(result, indent=1 if sys.argv[3] == "--json" else None), flush=True)
sys.exit(0 if all_good else 4)
"""


class Place:
    """A dataset, a program and a file of results."""

    def __init__(self, folder: Path):
        self.folder, self.out, self.log = folder, folder / "r.json", folder / "log"
        self.program = folder / "bin" / "program"
        self.program.parent.mkdir()
        self.program.write_text(PROGRAM.format(python=sys.executable, log=str(self.log), root=ROOT))
        self.program.chmod(0o755)
        for name in ("a", "b", "c"):
            self.write(name)

    def write(self, name: str, text: str = "") -> None:
        path = self.folder / "dataset" / "family" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# ---- backward ----\n{text}\n")

    def command(self, *options: str) -> list[str]:
        command = [sys.executable, ROOT / "scripts/verify_dataset.py", "--program", self.program]
        command += ["--dataset", self.folder / "dataset", "--out", self.out, "--runs", self.folder / "runs"]
        return [str(word) for word in command] + list(options)

    def call(self, *options: str) -> tuple[int, str]:
        self.log.write_text("")
        done = subprocess.run(self.command(*options), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def checked(self) -> list[str]:
        return sorted(line.split()[0] for line in self.log.read_text().splitlines())

    def results(self) -> dict[str, dict]:
        return {Path(row["file"]).stem: row for row in json.loads(self.out.read_text())["results"]}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_cards__those_that_fewest_have_come_first(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    cards = bounded.Cards()
    with cards.one() as first, cards.one() as second:
        assert (first, second) == (["--gpus", "3"], ["--gpus", "7"])
        with cards.one() as third:
            assert third == ["--gpus", "3"]
    with cards.one() as again:
        assert again == ["--gpus", "3"]


@pytest.mark.parametrize(
    ("visible", "had"),
    [("3, 7", {("--gpus", "3"), ("--gpus", "7")}), ("7", {()}), ("", {()})],
    ids=["several", "one", "none"],
)
def test_cards__alone__are_waited_for(monkeypatch, visible, had):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cards = bounded.Cards(most=1)
    with contextlib.ExitStack() as stack:
        assert {tuple(stack.enter_context(cards.one())) for _ in had} == had
        got = threading.Event()

        def next_one() -> None:
            with cards.one():
                got.set()

        waiting = threading.Thread(target=next_one)
        waiting.start()
        assert not got.wait(0.2)
    assert got.wait(60)
    waiting.join()


@pytest.mark.parametrize(("device", "told"), [("cuda", {"3", "7"}), ("cpu", set())])
def test_several_cards__each_check_has_one(place, monkeypatch, device, told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert place.call("--device", device, "--jobs", "2")[0] == 0
    asked = [line.split()[2:] for line in place.log.read_text().splitlines()]
    assert len(asked) == 3 and all(bool(told) == (len(card) == 1 and card[0] in told) for card in asked)


def test_end_all__ends_what_is_just_being_started_and_lets_nothing_start(monkeypatch):
    monkeypatch.setattr(bounded, "_closed", False)
    start, begun, go_on = bounded.start, threading.Event(), threading.Event()

    def slow(*args):
        process = start(*args)
        begun.set()
        go_on.wait()
        return process

    monkeypatch.setattr(bounded, "start", slow)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(bounded.run, ["sleep", "1000"], 60)
        begun.wait()
        ending = pool.submit(bounded.end_all)
        with pytest.raises(TimeoutError):
            ending.result(0.2)  # it waits for what is being started
        go_on.set()
        assert running.result().code == -signal.SIGTERM
        ending.result()
    assert bounded.run(["sleep", "1000"], 60).seconds == 0


def test_all_verified__are_counted_in_the_last_line(place):
    code, said = place.call()
    assert code == 0 and said.splitlines()[-1] == "3 passed, 0 failed"
    assert "3 of 3: verified" in said and "0 s left" in said
    assert place.results()["a"]["shapes"] == "2/2" and place.results()["a"]["error"] == 1e-7


@pytest.mark.parametrize(
    ("text", "reason"), [("WRONG", "x differs, dataset/x.py"), ("CRASH", "terminate called")]
)
def test_one_wrong__is_a_failure_with_its_reason(place, text, reason):
    place.write("b", text)
    code, said = place.call("--jobs", "2")
    assert code == 1 and said.splitlines()[-1] == "2 passed, 1 failed"
    assert reason in said and reason in place.results()["b"]["reason"]


def test_many__share_programs_and_each_has_its_own_result(place):
    for name in "defghijkl":
        place.write(name)
    place.write("b", "WRONG")
    place.write("e", "CRASH")
    place.write("h", "WAIT")
    code, said = place.call("--seconds", "2")
    assert code == 1 and said.splitlines()[-1] == "9 passed, 3 failed"
    verdicts = {name: row["verdict"] for name, row in place.results().items() if row["exit_code"] != 0}
    assert verdicts == {"b": "not_verified", "e": "error", "h": "late"}
    assert "terminate called" in place.results()["e"]["reason"]
    assert place.checked() == list("abcdefghijkl"), "each once"
    programs = Path(f"{place.log}.programs").read_text().count("program")
    assert programs == 6, "groups of three, and another program behind each of two that ended"


def test_result_of_another_file__is_nobodys(place):
    place.write("b", "OTHER")
    code, said = place.call()
    assert code == 1 and "where" in said and "b.py was checked" in said and "b" not in place.results()


def test_only__takes_what_matches_and_leaves_other_results(place):
    place.call()
    before = place.results()["c"]
    place.write("a", "WRONG")
    code, said = place.call("--only", "/[ab]\\.py$")
    assert code == 1 and said.splitlines()[-1] == "1 passed, 1 failed"
    assert place.checked() == ["a", "b"] and place.results()["c"] == before
    assert place.call("--only", "nothing")[0] == 2


def test_resume__checks_what_changed_and_counts_the_rest(place):
    place.write("b", "WRONG")
    place.call()
    place.write("c", "# another text")
    code, said = place.call("--resume")
    assert place.checked() == ["c"]
    assert code == 1 and said.splitlines()[-1] == "2 passed, 1 failed" and "x differs" in said
    assert place.call("--resume")[0] == 1 and place.checked() == []
    place.program.write_text(place.program.read_text() + "# a later program\n")
    place.call("--resume")
    assert place.checked() == ["a", "b", "c"]
    place.call()
    assert place.checked() == ["a", "b", "c"]


def test_dtypes__are_those_that_the_pair_names(place):
    place.write("a", "dtypes: fp32, bf16")
    place.write("b", "dtypes: fp32")
    assert place.call("--dtype", "own", "--device", "cuda")[0] == 0
    done = {(Path(row["file"]).stem, row["dtype"]) for row in json.loads(place.out.read_text())["results"]}
    assert done == {("a", "float32"), ("a", "bfloat16"), ("b", "float32"), ("c", "float32")}
    code, said = place.call("--dtype", "half", "--resume")
    assert code == 0 and place.checked() == [] and said.splitlines()[-1] == "3 passed, 0 failed"
    place.program.write_text(place.program.read_text() + "# a later program\n")
    assert place.call("--dtype", "half", "--resume", "same-text")[0] == 0 and place.checked() == []


def test_budget__what_had_no_turn_is_no_success(place):
    code, said = place.call("--budget", "-1")
    assert code == 1 and place.checked() == [] and said.count("had no turn") == 3
    assert said.splitlines()[-1] == "0 passed, 3 failed"
    assert place.call("--resume")[0] == 0 and place.checked() == ["a", "b", "c"]


def test_late__is_checked_again(place):
    place.write("b", "WAIT")
    assert place.call("--seconds", "2")[0] == 1 and place.results()["b"]["verdict"] == "late"
    place.call("--seconds", "2", "--resume")
    assert place.checked() == ["b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_in_the_middle__goes_on_where_it_was(place, number):
    place.write("b", "WAIT")
    with subprocess.Popen(place.command(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "1 of 3" in process.stdout.readline()
        while "b float32" not in place.log.read_text():
            time.sleep(0.02)
        process.send_signal(number)
        process.wait()
    left = subprocess.run(["pgrep", "-f", str(place.program)], capture_output=True, text=True, check=False)
    for pid in left.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    assert (left.stdout == "") == (number != signal.SIGKILL)
    assert list(place.results()) == ["a"]
    place.write("b")
    code, said = place.call("--resume")
    assert code == 0 and place.checked() == ["b", "c"] and said.splitlines()[-1] == "3 passed, 0 failed"

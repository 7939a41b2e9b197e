"""scripts/gpu.py and what it stands on, without a GPU: parts run, limits hold, and what is left behind is
seen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import bounded
import gpu


@pytest.fixture
def program() -> None:
    if not (ROOT / "build" / "kernel-agent").exists():
        pytest.skip("the program is not built")


def call(out: Path, *options: str) -> tuple[int, str, dict]:
    command = [sys.executable, str(ROOT / "scripts/gpu.py"), "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else {}


def test_parts__chosen__run_and_leave_their_results(program, tmp_path):
    code, said, found = call(
        tmp_path / "r.json",
        "--only",
        "killed,norm",
        "--limit",
        "killed=500",
        "--limit",
        "norm=500",
        "--budget",
        "1000",
    )
    assert code == 0, said
    assert list(found["parts"]) == ["killed", "norm"]
    assert found["parts"]["norm"]["verdict"] == "verified"
    assert found["parts"]["killed"]["processes_at_kill"] > 0
    assert found["parts"]["killed"]["processes_left"] == 0
    assert [line.split()[0] for line in said.splitlines()] == ["killed", "norm"]


def test_part__past_its_limit__is_late_and_counts_as_wrong(program, tmp_path):
    code, said, found = call(tmp_path / "r.json", "--only", "norm,sanitizer", "--limit", "norm=2")
    assert code == 1 and found["parts"]["norm"]["late"], said
    assert "skipped" in found["parts"]["sanitizer"]


def test_part__that_does_not_exist__is_named(tmp_path):
    code, said, found = call(tmp_path / "r.json", "--only", "nrom")
    assert code == 1 and "no part 'nrom'" in said and "norm" in said and not found


def test_part__that_raises__keeps_what_it_had(tmp_path, monkeypatch):
    def raising(_):
        yield {"done": 3}
        raise ValueError("no more")

    monkeypatch.setitem(gpu.PARTS, "two", (10, 10, raising))
    bench = gpu.Bench(tmp_path, "cpu", sys.executable, 1, tmp_path)
    made = gpu.run_part("two", bench, 10)
    assert (made["done"], made["failures"]) == (3, ["ValueError: no more"])


def test_bounded__command_past_its_limit__is_ended_with_its_children():
    mark = "ka-test-sleeper"
    ended = bounded.run(["bash", "-c", f"(exec -a {mark} sleep 1000) & echo begun; wait"], 4)
    assert ended.code is None and ended.out == "begun\n" and "ran past" in ended.why
    assert gpu.naming(mark) == []


def test_bounded__child_that_outlives_its_leader__is_ended_too():
    mark = "ka-test-orphan"
    ended = bounded.run(["bash", "-c", f"(exec -a {mark} sleep 1000 >/dev/null 2>&1) & exit 3"], 60)
    assert ended.code == 3 and gpu.settled(Path(mark), None)["processes_left"] == 0


def test_sanitizers_control__is_an_edit_of_the_small_pairs_backward():
    tail = (ROOT / gpu.SMALL).read_text().partition("# ---- backward ----")[2]
    assert tail.count(gpu.BEYOND[0]) == 1


def test_entry__is_small_and_has_what_went_wrong():
    result = {
        "verdict": "not_verified",
        "failures": "x" * 1000,
        "loop_blocked_ms": 7,
        "shapes": {"passed": 1},
    }
    made = gpu.entry_of(bounded.Ended(4, json.dumps(result), "", 1.0))
    assert made["loop_blocked_ms"] == 7 and len(made["reason"]) == gpu.TEXT_MAX
    none = gpu.entry_of(bounded.Ended(-6, "", "terminate called", 1.0))
    assert none["verdict"] == "none" and "signal 6" in none["reason"]


def test_entry__that_was_slow__says_what_its_longest_children_did():
    spans = [(0, 1), (1, 30), (2, 4), (3, 4), (4, 4.5), (5, 5.2), (6, 6.1)]
    result = {"children": [{"op": "oracle", "start": a, "end": b, "cases": 2} for a, b in spans]}
    slow = gpu.entry_of(bounded.Ended(0, json.dumps(result), "", 41.0))
    assert slow["longest"][0] == "oracle  1-30 s, 2 cases" and len(slow["longest"]) == gpu.LONGEST
    assert "longest" not in gpu.entry_of(bounded.Ended(0, json.dumps(result), "", 39.0))


@pytest.mark.parametrize(
    ("reason", "wrong"),
    [("oracle: RuntimeError: two devices", 1), ("the stub detaches a value on the way to its outputs", 0)],
)
def test_entry__whose_differences_broke__is_wrong(reason, wrong):
    result = {"verdict": "verified", "oracles": {"finite_differences": {"verdict": "none", "reason": reason}}}
    entry = gpu.entry_of(bounded.Ended(0, json.dumps(result), "", 1.0))
    assert len(gpu.wrong([{"file": "a.py"} | entry])) == wrong


def test_bench__on_a_cpu__is_skipped_and_the_program_says_why(program, tmp_path):
    code, said, found = call(tmp_path / "r.json", "--only", "bench", "--limit", "bench=500")
    assert code == 0 and "no time means anything" in said and "skipped" in found["parts"]["bench"]


def test_bench__of_an_example_and_a_pair__has_table_and_figures(program, tmp_path, monkeypatch):
    """The part of a GPU, with a package whose clock counts launches."""
    share = tmp_path / "share"
    shutil.copytree(ROOT / "sandbox", share / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
    clock = ROOT / "tests/python/fake_gpu.py"
    shutil.copy(clock, share / "sandbox/kernel_agent/operations/device_clock.py")
    monkeypatch.setenv("KA_SHARE", str(share))
    small = [{"M": 3, "N": 20}]
    monkeypatch.setattr(gpu, "TIMED", {"examples/softmax.py": small, gpu.SMALL: small})
    work = tmp_path / "work"
    work.mkdir()
    bench = gpu.Bench(ROOT / "build", "cuda", sys.executable, 1, work)
    honest = bench.run

    def run(*command, **options):
        return honest(*command, *(["--device", "cpu"] if "differentiate" in command else []), **options)

    monkeypatch.setattr(bench, "run", run)  # what is drafted there is traced on the GPU
    made = gpu.run_part("bench", bench, 1000)
    assert not made["failures"], made
    assert [row["verdict"] for row in made["rows"]] == ["timed", "timed"]
    example, pair = made["rows"]
    assert example["table"][0].startswith("softmax on fake")
    assert set(example["result"]["shapes"][0]["passes"]["bwd"]["subjects"]) == {"ours", "eager", "compile"}
    assert pair["result"]["shapes"][0]["dims"] == {"M": 3, "N": 20}

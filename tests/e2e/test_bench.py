"""The command bench from its command line to its table. There is no GPU here: a package whose clock counts
launches stands in for it, in the real jail."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Agent, Ended, copied_share
from files import BACKWARD, FORWARD

CLOCK = ROOT / "tests" / "python" / "fake_gpu.py"
REFERENCE = "\n\ndef reference(x, w):\n    return x * w\n"


@pytest.fixture
def share(agent: Agent) -> Path:
    folder = copied_share(agent.folder / "share")
    shutil.copy(CLOCK, clock_of(folder))
    return folder


def clock_of(share: Path) -> Path:
    return share / "sandbox" / "kernel_agent" / "operations" / "device_clock.py"


def pair(agent: Agent, more: str = REFERENCE) -> Path:
    path = agent.folder / "scale.py"
    head = FORWARD.replace(
        "from kernel_agent import autodiff\n",
        "\ndef autodiff(inputs_require_grad=()):\n    return lambda f: f\n",
    )
    path.write_text(f"{head}{more}\n\n# ---- backward ----\n\n\n{BACKWARD}")
    return path


def runtime(agent: Agent) -> Path:
    """Where the lock is: that of other tests is in theirs."""
    folder = agent.folder / "runtime"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def bench(agent: Agent, share: Path, path: Path, *options: str, **env: str) -> Ended:
    command = ["bench", path, "--device", "cuda", "--seconds", "1", "--python", sys.executable, *options]
    return agent(*command, env={"KA_SHARE": str(share), "XDG_RUNTIME_DIR": str(runtime(agent)), **env})


def results(agent: Agent) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(agent.folder.glob("generated/*/bench.json"))]


def test_pair__has_a_table_and_a_file_with_all_figures(agent: Agent, share: Path):
    ended = bench(agent, share, pair(agent))
    assert ended.code == 0, ended.err
    for title in ("backward", "forward", "forward and backward", "MiB saved for the backward / most"):
        assert re.search(rf"^{title}  ", ended.out, re.MULTILINE), ended.out
    assert re.search(r"^  M=4, N=24 .* \d+%$", ended.out, re.MULTILINE), ended.out
    assert "baseline: the file has no baseline() (M=4, N=24)" in ended.out
    (result,) = results(agent)
    assert [shape["dims"] for shape in result["shapes"]] == [{"M": 4, "N": 24}, {"M": 3, "N": 33}]
    ours = result["shapes"][0]["passes"]["fwd"]["subjects"]["ours"]
    assert ours["graph"]["median_ms"] == pytest.approx(0.11) and ours["graph"]["samples"] >= 7
    eager = result["geomean"]["fwd"]["alone"]["eager"]
    assert eager["ratio"] == pytest.approx(1 / 11) and eager["slower"] == 2 and eager["faster"] == 0
    assert 0 < result["claimed_seconds"] < result["wall_seconds"]
    assert str(agent.folder) in ended.out and not list(agent.folder.glob("generated/*/run.db"))


def test_only__one_pass__and_json_is_what_the_file_has(agent: Agent, share: Path):
    ended = bench(agent, share, pair(agent), "--only", "bwd", "--json", "--sweep", '[{"M": 2, "N": 5}]')
    assert ended.code == 0, ended.err
    (shape,) = ended.result["shapes"]
    assert shape["dims"] == {"M": 2, "N": 5} and set(shape["passes"]) == {"bwd"}
    (kept,) = results(agent)
    assert kept == {key: value for key, value in ended.result.items() if key != "written"}


def test_pair__in_its_run_folder__has_its_figures_beside_it(agent: Agent, share: Path):
    path = pair(agent)
    folder = agent.folder / "generated" / "scale-1"
    folder.mkdir(parents=True)
    (folder / "run.db").touch()
    ended = bench(agent, share, path.rename(folder / "scale.py"), "--only", "fwd")
    assert ended.code == 0, ended.err
    assert len(results(agent)) == 1 and (folder / "bench.json").exists()


def test_clock__that_claims_too_much_or_nothing__is_refused(agent: Agent, share: Path):
    clock = clock_of(share)
    honest = clock.read_text()
    clock.write_text(honest.replace("CALL, LAUNCH = 0.01, 0.1", "CALL, LAUNCH = 9e5, 0.1"))
    ended = bench(agent, share, pair(agent), "--only", "bwd")
    assert ended.code == 4 and "refused: the times together are" in ended.out, ended.out + ended.err
    clock.write_text(honest.replace("CALL, LAUNCH = 0.01, 0.1", "CALL, LAUNCH = 0.0, 0.0"))
    ended = bench(agent, share, pair(agent), "--only", "bwd")
    assert ended.code == 4 and "ours, backward alone, refused: not all samples are times" in ended.out


def test_pair__that_raises__ends_with_4_and_the_line(agent: Agent, share: Path):
    path = pair(agent)
    path.write_text(path.read_text().replace("def backward(ctx, ", "def backward(ctx, *, missing, ", 1))
    ended = bench(agent, share, path)
    assert ended.code == 4, ended.err
    assert "no result: " in ended.out and "1 positional argument" in ended.out, ended.out


def test_clocks__that_nvidia_smi_tells__are_kept_and_nothing_is_set(agent: Agent, share: Path):
    folder = agent.folder / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    answer = 'case "$*" in *event_reasons*) exit 2 ;; esac\necho "1980, 2619, 1980, 41, [N/A], 0x4"\n'
    smi.write_text(f'#!/bin/sh\necho "$@" >> {agent.folder}/asked\n{answer}')
    smi.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    ended = bench(agent, share, pair(agent), "--only", "fwd", PATH=path)
    assert ended.code == 0, ended.err
    reading = results(agent)[0]["clocks"][0]
    assert (reading["sm_mhz"], reading["watts"], reading["throttle"]) == (1980, None, "0x4")
    for line in (agent.folder / "asked").read_text().splitlines():
        assert line.startswith("--id=0 --query-gpu=")


def test_cpu__nothing_is_timed_and_it_says_so(agent: Agent):
    ended = agent("bench", pair(agent), "--device", "cpu", "--python", sys.executable)
    assert ended.code == 2 and "nothing was timed" in ended.err and not ended.out
    assert not (agent.folder / "generated").exists()


def test_no_gpu__behind_the_device__is_said(agent: Agent):
    ended = agent("bench", pair(agent), "--device", "cuda", "--python", sys.executable)
    assert ended.code == 2 and "torch finds no GPU" in ended.err, ended.err


@pytest.mark.parametrize(
    ("text", "words"),
    [(FORWARD, "there is nothing to time"), (None, "No such file"), ("\0", "NUL bytes")],
)
def test_file__that_cannot_be_timed__is_named(agent: Agent, text: str | None, words: str):
    path = agent.folder / "some.py"
    if text is not None:
        path.write_text(text)
    ended = agent("bench", path, "--device", "cuda", "--python", sys.executable)
    assert ended.code == 3 and words in ended.err, ended.err


def test_two_at_a_time__the_second_waits(agent: Agent, share: Path):
    agent.env |= {"KA_SHARE": str(share), "XDG_RUNTIME_DIR": str(runtime(agent))}
    with (runtime(agent) / f"kernel-agent-bench-{os.getuid()}-0.lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        process = agent.start("bench", pair(agent), "--device", "cuda", "--python", sys.executable)
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting for what others time on the GPU" in line:
                break
            assert "bench: bench" not in line
    said = process.communicate()[1]
    assert process.returncode == 0 and "bench: bench" in said, said


FULL = """
        asked = json.loads((self.scratch / "request.json").read_text())
        if asked.get("turns") and getattr(getattr(call, "__self__", None), "function", call).__name__ == "%s":
            raise torch.OutOfMemoryError("CUDA out of memory")
        call()
"""


@pytest.mark.parametrize("function", ["scale_autograd", "reference", "copy"])
def test_memory__that_runs_out_beside_others__is_had_once_they_are_through(
    agent: Agent, share: Path, function: str
):
    clock = clock_of(share)
    text = clock.read_text().replace("\nimport torch\n", "\nimport json\n\nimport torch\n", 1)
    text = text.replace("        self.kept = 0\n", "        self.kept = 0\n        self.scratch = scratch\n")
    clock.write_text(
        text.replace(
            "    def warm(self, call):\n        call()\n", "    def warm(self, call):" + FULL % function
        )
    )
    ended = bench(agent, share, pair(agent), "--only", "fwd")
    assert ended.code == 0, ended.err
    assert ended.err.count("once more, when others are through") == 1, ended.err
    subjects = results(agent)[0]["shapes"][0]["passes"]["fwd"]["subjects"]
    assert subjects["eager"]["alone"]["median_ms"] > 0 and subjects["ours"]["alone"]["median_ms"] > 0


def test_interrupt__ends_it_with_130_and_leaves_no_copies(agent: Agent, share: Path):
    clock = clock_of(share)
    clock.write_text(
        clock.read_text().replace("made = call()", "made = call() or __import__('time').sleep(9e9)")
    )
    agent.env |= {"KA_SHARE": str(share), "TMPDIR": str(agent.folder), "XDG_RUNTIME_DIR": str(runtime(agent))}
    command = ["bench", pair(agent), "--device", "cuda", "--python", sys.executable]
    process = agent.start(*command)
    assert process.stderr is not None
    for line in process.stderr:
        if "bench: ceilings" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not list(agent.folder.glob("kernel-agent-bench-*")) and not results(agent)


@pytest.mark.parametrize("name", ["activations", "class_only", "cross_entropy", "fused_add"])
def test_module__written_by_hand__is_timed_too(agent: Agent, share: Path, name: str):
    file = ROOT / "tests" / "e2e" / "handwritten" / f"{name}.py"
    ended = bench(agent, share, file, "--sweep", "required", "--only", "both")
    assert ended.code == 0, ended.out + ended.err
    assert results(agent)[0]["shapes"][0]["passes"]["both"]["subjects"]["ours"]["graph"]["median_ms"] > 0

"""Runs that stop and go on: the mailbox, Ctrl-C, and kill -9 in every phase."""

from __future__ import annotations

import json
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Endpoint, ended
from files import BACKWARD, FORWARD, PATCH, WRONG, fenced


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


def states(run_dir: Path) -> list[str]:
    """The states that the run has entered. Of a journal that is being written the last line may be half
    there."""
    journal = run_dir / "run.jsonl"
    whole, _, _ = (journal.read_text() if journal.exists() else "").rpartition("\n")
    return [event["to"] for event in map(json.loads, whole.splitlines()) if event["event"] == "state"]


def wait_for_state(agent: Agent, wanted: str, times: int = 1) -> Path:
    """The run folder, once the run has entered that state so often."""
    while True:
        for run_dir in agent.run_dirs():
            if states(run_dir).count(wanted) >= times:
                return run_dir
        time.sleep(0.01)


def answer(agent: Agent, text: str) -> Path:
    """Put an answer beside the one request that has none."""
    requests = sorted((agent.folder / "box").glob("*.request.md"))
    open_ones = [path for path in requests if not Path(str(path).replace(".request.", ".answer.")).exists()]
    assert len(open_ones) == 1
    Path(str(open_ones[0]).replace(".request.", ".answer.")).write_text(text)
    return open_ones[0]


def test_mailbox_asks_waits_and_goes_on(agent: Agent, forward: Path) -> None:
    box = [
        "--file-path",
        str(forward),
        "--backend",
        "mailbox:box",
        "--draft",
        "llm",
        "--no-wait",
        "--json",
        "--no-optimise",
    ]
    first = agent(*box)
    assert first.code == 75 and first.result["verdict"] == "waiting", first.err
    assert Path(first.result["request"]).exists()
    still = agent(*box, "--resume")
    assert still.code == 75
    assert len(list((agent.folder / "box").glob("*.request.md"))) == 1
    nobody = agent("--resume", first.result["run_dir"])
    assert nobody.code == 2 and "no model is set: add --backend mailbox:box" in nobody.err, nobody.err
    request = answer(agent, fenced(WRONG))
    assert "scale_autograd" in request.read_text()
    second = agent(*box, "--resume")
    assert second.code == 75, second.err
    facts = answer(agent, PATCH).read_text()
    assert "w" in facts and "not verified" in second.err
    # What the run is for is remembered: it does not begin to optimise.
    last = agent(*(word for word in box if word != "--no-optimise"), "--resume")
    assert last.code == 0, last.err
    assert last.result["verdict"] == "verified" and last.result["attempts"] == 2
    assert last.result["run_dir"] == first.result["run_dir"]


def test_mailbox_while_waiting(agent: Agent, forward: Path) -> None:
    process = agent.start(
        "--file-path", forward, "--backend", "mailbox:box", "--draft", "llm", "--json", "--no-optimise"
    )
    while not list((agent.folder / "box").glob("*.request.md")):
        assert process.poll() is None
        time.sleep(0.05)
    answer(agent, fenced(BACKWARD))
    done = ended(*finish(process))
    assert done.code == 0 and done.result["verdict"] == "verified", done.err


def finish(process: Any) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


STEPS = [
    {"text": fenced(WRONG)},
    {"tool": "submit_patch", "arguments": {"patch": PATCH}},
    # Wrong again, in other words: a candidate known byte for byte is not checked a second time, and nothing
    # could be killed.
    {"text": fenced(WRONG + "\n# Once more.\n")},
]

PHASES = [
    ("inspect", 1),
    ("preflight", 1),
    ("retrieve", 1),
    ("draft", 1),
    ("check", 1),
    ("fix", 1),
    ("check", 2),
    ("optimise", 1),
    ("check", 3),
]


def judged(run_dir: Path) -> list[tuple[str, str]]:
    """The snapshots with a verdict; the file is closed again, since a run wants it for itself."""
    with closing(sqlite3.connect(run_dir / "run.db")) as db:
        return db.execute(
            "SELECT hash, verdict FROM snapshot WHERE verdict IS NOT NULL ORDER BY id"
        ).fetchall()


@pytest.mark.parametrize(("phase", "times"), PHASES, ids=[f"{phase}-{times}" for phase, times in PHASES])
def test_kill_in_every_phase_loses_nothing(
    agent: Agent, forward: Path, endpoint: Callable[..., Endpoint], phase: str, times: int
) -> None:
    model = endpoint(STEPS, "--repeat")
    arguments = [
        "--file-path",
        str(forward),
        "--base-url",
        model.url,
        "--draft",
        "llm",
        "--patience-perf",
        "1",
        "--json",
    ]
    process = agent.start(*arguments)
    run_dir = wait_for_state(agent, phase, times)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # Whether the question of that moment had reached the endpoint is chance: the one for the rest answers in
    # any phase.
    rest = endpoint([{"text": fenced(BACKWARD)}, {"text": fenced(WRONG)}], "--repeat")
    arguments[arguments.index(model.url)] = rest.url
    before = judged(run_dir)
    done = agent(*arguments, "--resume")
    assert done.result["run_dir"] == str(run_dir)
    assert judged(run_dir)[: len(before)] == before
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "range(0, M)" in Path(done.result["pair"]).read_text()


def test_interrupt_is_resumable(agent: Agent, forward: Path, endpoint: Callable[..., Endpoint]) -> None:
    model = endpoint([{"text": fenced(BACKWARD)}], "--repeat")
    arguments = [
        "--file-path",
        str(forward),
        "--base-url",
        model.url,
        "--draft",
        "llm",
        "--no-optimise",
        "--json",
    ]
    process = agent.start(*arguments)
    wait_for_state(agent, "check")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "--resume" in err
    done = agent(*arguments, "--resume")
    assert done.code == 0, done.err


def test_changed_forward_is_not_resumed(agent: Agent, forward: Path) -> None:
    box = ["--file-path", str(forward), "--backend", "mailbox:box", "--draft", "llm", "--no-wait"]
    assert agent(*box).code == 75
    forward.write_text(FORWARD.replace("row by row", "row for row"))
    done = agent(*box, "--resume")
    assert done.code == 2 and "has changed" in done.err


def test_two_processes_on_one_run(agent: Agent, forward: Path) -> None:
    process = agent.start("--file-path", forward, "--backend", "mailbox:box", "--draft", "llm")
    run_dir = wait_for_state(agent, "draft")
    done = agent("--resume", run_dir, "--backend", "mailbox:box")
    process.send_signal(signal.SIGINT)
    finish(process)
    assert done.code == 2 and "another" in done.err


def test_batch_skips_what_is_verified_and_counts_failures(
    agent: Agent, endpoint: Callable[..., Endpoint]
) -> None:
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    (kernels / "good.py").write_text(FORWARD)
    (kernels / "bad.py").write_text(
        FORWARD.replace("    M, N = x.shape", "    raise ValueError('never')\n    M, N = x.shape")
    )
    (kernels / "notes.py").write_text("x = 1\n")
    model = endpoint([{"text": fenced(BACKWARD)}], "--repeat")
    arguments = [
        "batch",
        str(kernels),
        "--jobs",
        "2",
        "--base-url",
        model.url,
        "--draft",
        "llm",
        "--no-optimise",
        "--json",
    ]
    first = agent(*arguments)
    assert first.code == 3
    outcomes = {Path(item["file"]).name: item["outcome"] for item in first.result["files"]}
    assert outcomes == {"good.py": "verified", "bad.py": "unusable"}
    second = agent(*arguments)
    outcomes = {Path(item["file"]).name: item["outcome"] for item in second.result["files"]}
    assert outcomes == {"good.py": "unchanged", "bad.py": "unusable"}


def test_batch_leaves_alone_what_another_batch_works_on(agent: Agent) -> None:
    kernels = agent.folder / "kernels"
    kernels.mkdir()
    (kernels / "scale.py").write_text(FORWARD)
    arguments = [
        "batch",
        str(kernels),
        "--backend",
        "mailbox:box",
        "--draft",
        "llm",
        "--no-optimise",
        "--json",
    ]
    first = agent.start(*arguments)
    while not list((agent.folder / "box").glob("*.request.md")):
        time.sleep(0.02)
    second = agent(*arguments, "--no-wait")
    (item,) = second.result["files"]
    assert (second.code, item["outcome"]) == (2, "error") and "another process" in item["reason"], second
    assert len(agent.run_dirs()) == 1
    answer(agent, fenced(BACKWARD))
    assert finish(first)[0] == 0

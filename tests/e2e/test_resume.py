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
from conftest import Agent, Endpoint
from files import FORWARD, MEND, RAISES, SMALL, SMALL_BACKWARD, fenced


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


@pytest.fixture
def small(agent: Agent) -> Path:
    path = agent.folder / "square.py"
    path.write_text(SMALL)
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
    request = answer(agent, fenced(RAISES))
    assert "scale_autograd" in request.read_text()
    second = agent(*box, "--resume")
    assert second.code == 75, second.err
    facts = answer(agent, MEND).read_text()
    assert "contigous" in facts and "not verified" in second.err
    # What the run is for is remembered: it does not begin to optimise.
    last = agent(*(word for word in box if word != "--no-optimise"), "--resume")
    assert last.code == 0, last.err
    assert last.result["verdict"] == "verified" and last.result["attempts"] == 2
    assert last.result["run_dir"] == first.result["run_dir"]


def finish(process: Any) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


SMALL_WRONG = SMALL_BACKWARD.replace("2.0 * x * dy", "x * dy")
SMALL_RAISES = SMALL_BACKWARD.replace("dy.contiguous()", "dy.contigous()")

# phase: what the model says until then. The check of what raises is short, and nothing could be killed in it.
PHASES = {
    "inspect": [],
    "preflight": [],
    "retrieve": [],
    "draft": [],
    "check": [SMALL_WRONG],
    "fix": [SMALL_RAISES],
    "check of a mended one": [SMALL_RAISES, SMALL_BACKWARD],
    "optimise": [SMALL_BACKWARD],
    "check of an optimised one": [SMALL_BACKWARD, SMALL_WRONG],
}


def judged(run_dir: Path) -> list[tuple[str, str]]:
    """The snapshots with a verdict; the file is closed again, since a run wants it for itself."""
    with closing(sqlite3.connect(run_dir / "run.db")) as db:
        return db.execute(
            "SELECT hash, verdict FROM snapshot WHERE verdict IS NOT NULL ORDER BY id"
        ).fetchall()


@pytest.mark.parametrize("name", PHASES)
def test_kill_in_every_phase_loses_nothing(
    agent: Agent, small: Path, endpoint: Callable[..., Endpoint], name: str
) -> None:
    said = PHASES[name]
    model = endpoint([{"text": fenced(text)} for text in said or [SMALL_BACKWARD]], "--repeat")
    given = ["--file-path", str(small), "--draft", "llm", "--patience-perf", "1", "--json"]
    process = agent.start(*given, "--base-url", model.url)
    run_dir = wait_for_state(agent, name.partition(" ")[0], max(1, len(said)) if "check" in name else 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    # Whether the question of that moment had reached the endpoint is chance: the one for the rest answers in
    # any phase.
    rest = endpoint([{"text": fenced(SMALL_BACKWARD)}, {"text": "Nothing is left to gain."}], "--repeat")
    before = judged(run_dir)
    assert len(before) >= len(said) - 1  # the last verdict may have been on its way to the disk
    done = agent(*given, "--base-url", rest.url, "--resume")
    assert done.result["run_dir"] == str(run_dir)
    assert judged(run_dir)[: len(before)] == before
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert "2.0 * x * dy" in Path(done.result["pair"]).read_text()


def test_interrupt_is_resumable(agent: Agent, small: Path, endpoint: Callable[..., Endpoint]) -> None:
    model = endpoint([{"text": fenced(SMALL_BACKWARD)}], "--repeat")
    arguments = [
        "--file-path",
        str(small),
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


def test_options_that_are_not_given_again_are_those_of_the_beginning(agent: Agent, small: Path) -> None:
    """One shape of another size, in half precision: nothing of that is in the file."""
    about = [
        "--sweep",
        '[{"N": 40}]',
        "--dtype",
        "float16",
        "--draft",
        "llm",
        "--no-optimise",
        "--max-iters",
        "1",
    ]
    box = ["--file-path", small, "--backend", "mailbox:box", "--no-wait", "--json"]
    first = agent(*box, *about)
    assert first.code == 75, first.err
    answer(agent, fenced(SMALL_WRONG))
    other = agent(*box, "--resume", "--dtype", "float32")
    assert other.code == 2 and "began with --dtype 'float16', not 'float32'" in other.err, other.err
    only = agent(*box, "--resume", "--max-iters", "2")  # a budget may be raised
    assert only.code == 75, only.err
    answer(agent, fenced(SMALL_BACKWARD))
    last = agent(*box, "--resume", "--max-iters", "2")
    assert last.code == 0, last.err
    assert last.result["per_shape"][0]["shape"] == {"N": 40}, last.result
    assert last.result["gradients"][0]["error"] > 1e-5  # of half precision


def test_two_processes_on_one_run(agent: Agent, forward: Path) -> None:
    process = agent.start("--file-path", forward, "--backend", "mailbox:box", "--draft", "llm")
    run_dir = wait_for_state(agent, "draft")
    done = agent("--resume", run_dir, "--backend", "mailbox:box")
    process.send_signal(signal.SIGINT)
    finish(process)
    assert done.code == 2 and "another" in done.err

"""Runs that time their candidates on one card, beside each other. There is no GPU here: see fake_card.py."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import fake_card
from conftest import Agent
from files import SMALL
from service import Service, variant
from service import serve as serve  # a fixture


def test_runs_that_race_on_one_card__come_to_their_end(agent: Agent, serve: Callable[..., Service]) -> None:
    fake_card.install(agent)
    options = ("--gpus", "0", "--jobs", "2", "--max-iters", "2", "--no-retrieval", "--python", sys.executable)
    service = serve("--device", "cuda", *options)
    runs = [service.submit(variant(number))["id"] for number in range(2)]
    for ended in [service.wait(run) for run in runs]:
        assert ended["verdict"] == "verified", ended
        journal = (Path(ended["folder"]) / "run.jsonl").read_text().splitlines()
        told = [
            line for line in map(json.loads, journal) if line["event"] == "child" and line["op"] == "bench"
        ]
        assert told and all(line["status"] == 0 for line in told), told
        assert any(line["paused_ms"] for line in told), told


FULL = """
        if (Path(__file__).parent / "crowded").exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")
"""
RUN = "        recording = self.record(self.dtype)\n        self.require_taken(recording)\n"


def test_case_that_found_no_room__waits_until_other_programs_are_through(agent: Agent) -> None:
    fake_card.install(agent)
    oracle = agent.folder / "share" / "sandbox" / "kernel_agent" / "operations" / "oracle.py"
    assert RUN in oracle.read_text()
    oracle.write_text(oracle.read_text().replace(RUN, FULL + RUN, 1))
    crowded = oracle.parent / "crowded"
    crowded.touch()
    (agent.folder / "square.py").write_text(SMALL)
    locks = agent.folder / "runtime"
    with (locks / f"kernel-agent-gpu-{os.getuid()}-0.lock").open("w+") as other:
        fcntl.lockf(other, fcntl.LOCK_SH)
        options = ("--device", "cuda", "--gpus", "0", "--backend", "none", "--no-optimise", "--json")
        run = agent.start("--file-path", "square.py", *options, "--python", sys.executable)
        assert run.stderr
        told = iter(run.stderr.readline, "")
        assert any("once more, alone: the GPU had no room for them" in line for line in told)
        assert any("waiting for what others check on the GPU" in line for line in told)
        crowded.unlink()
        fcntl.lockf(other, fcntl.LOCK_UN)
        out, err = run.communicate()
    assert run.returncode == 0, err
    assert json.loads(out)["shapes"]["required"] == 1

"""Runs on several GPUs: each has one, its children see no other, and a benchmark has one alone. There is no
GPU here: children take the CPU where they are told cuda, and say which card they were given."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_card
import pytest
from conftest import Agent
from files import SMALL_BACKWARD
from service import Service, variant
from service import serve as serve  # a fixture

SERVED = ("--device", "cuda", "--no-optimise", "--no-retrieval", "--python", sys.executable)


@pytest.fixture(autouse=True)
def cards(agent: Agent) -> None:
    fake_card.install(agent)


def lock(agent: Agent, what: str, card: str, how: int) -> Iterator[None]:
    """What another process would hold."""
    path = agent.folder / "runtime" / f"kernel-agent-{what}-{os.getuid()}-{card}.lock"
    with path.open("a+") as file:
        fcntl.lockf(file, how | fcntl.LOCK_NB)
        yield


def cards_of(run: dict[str, Any]) -> set[str]:
    """Which cards the children of a run were given that would have launched kernels."""
    journal = (Path(run["folder"]) / "run.jsonl").read_text().splitlines()
    told = [str(line.get("stderr", "")) for line in map(json.loads, journal) if line["event"] == "child"]
    return {line.split()[1] for text in told for line in text.splitlines() if line.startswith("card ")}


def slots(service: Service) -> dict[str, dict[str, Any]]:
    return {slot["gpu"]: slot for slot in service.ask("GET", "/v1/machine").doc["slots"]}


def test_runs_are_spread_and_their_children_see_one_card(serve: Callable[..., Service]) -> None:
    service = serve(*SERVED, "--gpus", "GPU-7a,3", "--jobs", "2")
    runs = [service.submit(variant(number))["id"] for number in range(4)]
    ended = [service.wait(run) for run in runs]
    assert [run["verdict"] for run in ended] == ["verified"] * 4, ended
    assert {run["gpu"] for run in ended[:2]} == {"GPU-7a", "3"}
    for run in ended:
        assert cards_of(run) == {run["gpu"]}
    assert {name: slot["runs"] for name, slot in slots(service).items()} == {"GPU-7a": 0, "3": 0}
    assert 'kernel_agent_gpu_runs{gpu="3"} 0' in service.ask("GET", "/metrics").body.decode()


def test_card_that_a_benchmark_has__is_waited_for_and_the_others_go_on(
    agent: Agent, serve: Callable[..., Service]
) -> None:
    held = lock(agent, "bench", "1", fcntl.LOCK_EX)
    next(held)
    service = serve(*SERVED, "--gpus", "0,1", "--jobs", "2")
    first, second = (service.submit(variant(number))["id"] for number in range(2))
    assert service.wait(first)["gpu"] == "0"
    third = service.submit(variant(3))["id"]
    assert service.wait(third)["gpu"] == "0"
    waits = service.run(second)
    assert (waits["state"], waits["gpu"]) == ("running", "1")
    now = slots(service)["1"]
    assert (now["runs"], now["children"], now["benchmark"]) == (1, 0, True)
    metrics = service.ask("GET", "/metrics").body.decode()
    assert 'kernel_agent_gpu_benchmark{gpu="0"} 0' in metrics
    assert 'kernel_agent_gpu_benchmark{gpu="1"} 1' in metrics
    table = agent("status", "--state", "state").out
    assert [line.split()[-2:] for line in table.splitlines() if second in line] == [["1", "forward.py"]]
    held.close()
    ended = service.wait(second)
    assert ended["verdict"] == "verified" and cards_of(ended) == {"1"}


def pair(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(f"{variant(0)}\n\n# ---- backward ----\n\n\n{SMALL_BACKWARD}")
    return path


def test_benchmark__waits_for_what_others_check_and_nobody_begins_there(agent: Agent) -> None:
    held = lock(agent, "gpu", "0", fcntl.LOCK_SH)
    next(held)
    command = ("bench", pair(agent), "--device", "cuda", "--gpus", "0", "--seconds", "1", "--only", "fwd")
    process = agent.start(*command, "--python", sys.executable)
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for what others check" in line:
            break
    with pytest.raises(OSError):
        next(lock(agent, "bench", "0", fcntl.LOCK_SH))
    held.close()
    _, err = process.communicate()
    assert process.returncode == 0, err


def test_benchmark__takes_a_card_that_is_free_and_reads_its_clock(agent: Agent) -> None:
    held = lock(agent, "bench", "0", fcntl.LOCK_EX)
    next(held)
    asked, tools = agent.folder / "asked", agent.folder / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(
        f'#!/bin/sh\necho "$1" >> {asked}\necho "1980, 2619, 1980, 41, 9, 0x0"\n'
    )
    (tools / "nvidia-smi").chmod(0o755)
    agent.env["PATH"] = f"{tools}:{agent.env['PATH']}"
    command = ("bench", pair(agent), "--device", "cuda", "--gpus", "0,5", "--seconds", "1", "--only", "fwd")
    ended = agent(*command, "--log-level", "debug", "--python", sys.executable)
    assert ended.code == 0, ended.err
    assert "card 5" in ended.err and "card 0" not in ended.err
    assert set(asked.read_text().split()) == {"--id=5"}


def test_cards_of_the_environment__are_those_that_are_used(
    agent: Agent, serve: Callable[..., Service]
) -> None:
    agent.env["CUDA_VISIBLE_DEVICES"] = "6,2"
    service = serve(*SERVED, "--jobs", "1")
    assert list(slots(service)) == ["6", "2"]
    run = service.wait(service.submit(variant(1))["id"])
    assert run["gpu"] == "6" and cards_of(run) == {"6"}


def test_cards__that_are_no_list__are_refused(agent: Agent) -> None:
    for wrong in ("0,0", "0,,1", "a b"):
        ended = agent(
            "serve", "--state", "state", "--device", "cuda", "--gpus", wrong, "--python", sys.executable
        )
        assert ended.code == 2 and "gpus: " in ended.err, ended.err


def test_runs__of_a_batch__are_spread_too(agent: Agent) -> None:
    (agent.folder / "files").mkdir()
    for number in range(2):
        (agent.folder / "files" / f"file{number}.py").write_text(variant(number))
    command = ("batch", "files", *SERVED, "--gpus", "0,1", "--jobs", "2")
    ended = agent(*command, "--out", "made")
    assert ended.code == 0, ended.err
    found = {
        path.parent.name: cards_of({"folder": str(path.parent)})
        for path in agent.folder.glob("made/*/run.jsonl")
    }
    assert sorted(map(sorted, found.values())) == [["0"], ["1"]]

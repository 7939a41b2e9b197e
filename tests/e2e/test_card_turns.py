"""Runs that time their candidates on one card, beside each other. There is no GPU here: see fake_card.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import fake_card
from conftest import Agent
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

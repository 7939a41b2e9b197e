"""The service is ended, in every way and at any moment: no run is lost, none is done twice."""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Endpoint
from files import SMALL, SMALL_BACKWARD, fenced
from service import ASKS, Service, answer, asked, variant
from service import serve as serve  # a fixture


def events(run_dir: Path) -> list[dict[str, Any]]:
    """Those of a run; of a journal that is being written the last line may be half there."""
    journal = run_dir / "run.jsonl"
    whole, _, _ = (journal.read_text() if journal.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def edit(service: Service, run: str, **changes: object) -> None:
    """The ledger of a service that is not running, as an earlier moment left it."""
    with closing(sqlite3.connect(service.agent.folder / "state" / "ledger.db")) as db, db:
        (text,) = db.execute("SELECT doc FROM entry WHERE id = ?", (run,)).fetchone()
        db.execute(
            "UPDATE entry SET doc = ? WHERE id = ?", (json.dumps({**json.loads(text), **changes}), run)
        )


@pytest.mark.parametrize("state", ["inspect", "preflight", "check", "done"])
def test_run_goes_on_after_a_kill(serve: Callable[..., Service], state: str) -> None:
    service = serve("--no-optimise")
    run = service.submit(SMALL)["id"]
    while not any(event.get("to") == state for folder in service.folders(run) for event in events(folder)):
        time.sleep(0.005)
    service.kill()
    service.start()
    ended = service.wait(run)
    assert ended["verdict"] == "verified", ended
    (folder,) = service.folders(run)
    kinds = [event["event"] for event in events(folder)]
    assert kinds.count("start") == 1
    if ended["starts"] == 2:
        assert "resume" in kinds
    else:
        assert state == "done"  # its end was on the disk already


def test_start_that_was_only_intended_is_made_up_for(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    waits, run = service.submit(variant(0))["id"], service.submit(SMALL)["id"]
    asked(service.agent, 1)
    service.kill()
    edit(service, waits, state="cancelled")
    edit(service, run, state="running", starts=1, started=time.time())
    service.start()
    asked(service.agent, 2)
    assert len(service.folders(run)) == 1 and service.run(run)["starts"] == 2


def test_end_that_was_not_written_is_found_again(serve: Callable[..., Service]) -> None:
    service = serve("--no-optimise")
    run = service.submit(SMALL)["id"]
    ended = service.wait(run)
    service.kill()
    edit(service, run, state="running", exit_code=None, verdict=None, folder=None, ended=None)
    service.start()
    again = service.wait(run)
    assert (again["verdict"], again["folder"]) == ("verified", ended["folder"])
    assert len(service.folders(run)) == 1
    checks = [event for event in events(Path(ended["folder"])) if event.get("to") == "check"]
    assert len(checks) == 1


def test_run_that_ends_the_service_each_time_is_given_up(serve: Callable[..., Service]) -> None:
    service = serve("--no-optimise")
    run = service.submit(variant(1))["id"]
    service.kill()
    edit(service, run, state="running", starts=50)
    service.start()
    ended = service.wait(run)
    assert (ended["state"], ended["exit_code"]) == ("failed", 1) and "too often" in ended["reason"]


def test_run_that_is_interrupted_over_and_over_lets_others_go_first(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    often, other = (service.submit(variant(number))["id"] for number in range(2))
    asked(service.agent, 1)
    for starts, others, first, second in (
        (3, 0, often, other),
        (4, 0, other, often),
        (9, 5, other, often),
        (9, 9, often, other),
    ):
        service.kill()
        edit(service, often, state="running", starts=starts)
        edit(service, other, state="running" if others else "queued", starts=others)
        service.start()
        service.wait(first, "running")
        assert service.run(second)["state"] == "queued"
    assert service.ask("POST", f"/v1/runs/{other}/cancel").status == 200
    service.wait(often, "running")


def test_sigterm_drains_and_the_next_service_goes_on(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    running, queued = service.submit(variant(0))["id"], service.submit(variant(1))["id"]
    asked(agent, 1)
    assert service.end() == 0
    assert not (agent.folder / "state" / "address").exists()
    service.start()
    assert service.wait(running, "running")["starts"] == 2
    answer(agent, 2)
    for run in (running, queued):
        assert service.wait(run)["verdict"] == "verified"
        assert len(service.folders(run)) == 1
    assert len(list((agent.folder / "box").glob("*.request.md"))) == 2  # nothing was asked twice


def test_what_was_answered_with_202_is_there_after_a_kill(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    taken: list[str] = []
    numbers = iter(range(100_000))

    def submit() -> None:
        with suppress(OSError, ValueError):  # the service is gone
            while True:
                taken.append(service.submit(variant(next(numbers)))["id"])

    for _ in range(4):
        threads = [threading.Thread(target=submit) for _ in range(4)]
        before = len(taken)
        for thread in threads:
            thread.start()
        while len(taken) < before + random.randint(1, 40):
            time.sleep(0.001)
        service.kill()
        for thread in threads:
            thread.join()
        service.start()
        for run in taken:
            assert service.run(run)["state"] in ("queued", "running")
            assert list((service.agent.folder / "state" / "runs" / run).glob("forward.py"))


def test_what_was_cancelled_stays_cancelled_after_a_kill(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    runs = [service.submit(variant(number))["id"] for number in range(4)]
    asked(service.agent, 1)
    for run in runs:
        assert service.ask("POST", f"/v1/runs/{run}/cancel").status == 200
        service.kill()
        service.start()
        assert service.run(run)["state"] == "cancelled"


def test_kills_at_any_moment_lose_and_double_nothing(serve: Callable[..., Service]) -> None:
    service = serve("--no-optimise", "--jobs", "2")
    runs = [service.submit(variant(number, SMALL))["id"] for number in range(4)]
    for _ in range(6):
        time.sleep(random.uniform(0.1, 3))
        service.kill()
        service.start()
    for run in runs:
        ended = service.wait(run)
        assert (ended["state"], ended["verdict"], ended["attempt"]) == ("done", "verified", 1), ended
        whole = [folder for folder in service.folders(run) if (folder / "result.json").exists()]
        assert [str(folder) for folder in whole] == [ended["folder"]]
    assert service.ask("GET", "/v1/runs").doc["total"] == len(runs)


def test_endpoint_that_fails_is_asked_again_later(
    serve: Callable[..., Service], endpoint: Callable[..., Endpoint]
) -> None:
    down = {"status": 503, "error": "not now", "headers": {"Retry-After": "0"}}
    model = endpoint([down] * 6 + [{"text": fenced(SMALL_BACKWARD)}])
    service = serve("--base-url", model.url, "--draft", "llm", "--no-optimise")
    run = service.submit(SMALL)["id"]
    while (waiting := service.run(run))["attempt"] == 1:
        time.sleep(0.02)
    assert waiting["state"] == "queued" and "not now" in waiting["reason"], waiting
    assert waiting["not_before"] > waiting["submitted"]
    service.kill()
    service.start()
    ended = service.wait(run)
    assert ended["verdict"] == "verified" and ended["started"] >= waiting["started"]
    assert len(service.folders(run)) == 2


@pytest.mark.parametrize("status", [400, 401])
def test_endpoint_that_refuses_ends_the_run(
    serve: Callable[..., Service], endpoint: Callable[..., Endpoint], status: int
) -> None:
    model = endpoint([{"status": status, "error": "never"}], "--repeat")
    service = serve("--base-url", model.url, "--draft", "llm", "--no-optimise")
    run = service.submit(SMALL)["id"]
    while not (ended := service.run(run))["reason"]:
        time.sleep(0.02)
    assert (ended["state"], ended["exit_code"], ended["attempt"]) == ("failed", 5, 1), ended
    assert f"HTTP {status}: never" in ended["reason"]
    assert len(service.folders(run)) == 1

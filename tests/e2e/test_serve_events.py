"""What happens in a run and in the queue, as server-sent events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conftest import Agent
from files import SMALL
from service import ASKS, Service, answer, asked, variant
from service import serve as serve  # a fixture

Event = tuple[str, str, dict[str, Any]]


@contextlib.contextmanager
def stream(service: Service, path: str, last: str = "") -> Iterator[Iterator[Event]]:
    """The events as they come: id, type, document."""
    sock = service.connect()
    more = f"Last-Event-ID: {last}\r\n" if last else ""
    sock.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n{more}\r\n".encode())
    lines = sock.makefile(encoding="utf-8", newline="\n")
    assert " 200 " in lines.readline()
    while lines.readline().strip():
        pass
    yield events(lines)
    lines.close()
    sock.close()


def events(lines: Any) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}


def test_events_of_a_run_are_its_journal(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    run = service.submit(SMALL)["id"]
    with stream(service, f"/v1/runs/{run}/events") as found:
        seen = [next(found)]
        while seen[-1][2].get("to") != "draft":
            seen.append(next(found))
        asked(agent, 1)
        answer(agent)
        seen += list(found)
    assert seen[-1][1] == "end" and seen[-1][2]["verdict"] == "verified"
    journal = (Path(seen[-1][2]["folder"]) / "run.jsonl").read_text().splitlines()
    assert [doc for _, _, doc in seen[:-1]] == [json.loads(line) for line in journal]
    assert [kind for _, kind, _ in seen[:3]] == [json.loads(line)["event"] for line in journal[:3]]
    middle = len(seen) // 2
    with stream(service, f"/v1/runs/{run}/events", seen[middle][0]) as found:
        assert list(found) == seen[middle + 1 :]
    for wrong in ("x", "1:", "1:7", "1:99999999999", "-1:0", "1:0:0"):  # from the beginning, then
        with stream(service, f"/v1/runs/{run}/events", wrong) as found:
            assert list(found) == seen, wrong


def test_events_of_the_queue_tell_what_changed(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    first = service.submit(variant(0))["id"]
    asked(agent, 1)
    with stream(service, "/v1/events") as found:
        assert next(found)[2] == service.run(first)
        second = service.submit(variant(1))["id"]
        last, kind, doc = next(found)
        assert (kind, doc["id"], doc["state"]) == ("run", second, "queued")
    service.ask("POST", f"/v1/runs/{second}/cancel")
    with stream(service, "/v1/events", last) as found:
        last, _, doc = next(found)
        assert (doc["id"], doc["state"]) == (second, "cancelled")
    service.kill()
    service.start()  # what it was told before it knows; all may have changed since
    with stream(service, "/v1/events", last) as found:
        assert {next(found)[2]["id"], next(found)[2]["id"]} == {first, second}


def test_events_of_a_cancelled_run_are_still_there(agent: Agent, serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    run = service.submit(SMALL)["id"]
    asked(agent, 1)
    service.ask("POST", f"/v1/runs/{run}/cancel")
    for _ in range(2):
        with stream(service, f"/v1/runs/{run}/events") as found:
            seen = list(found)
        assert seen[-1][2]["state"] == "cancelled" and "prompt" in [kind for _, kind, _ in seen]
        service.kill()
        service.start()


def test_streams_past_the_limit_are_refused(serve: Callable[..., Service]) -> None:
    service = serve(*ASKS)
    with contextlib.ExitStack() as stack:
        for _ in range(128):
            stack.enter_context(stream(service, "/v1/events"))
        refused = service.ask("GET", "/v1/events")
        assert (refused.status, refused.code) == (503, "busy") and refused.headers["retry-after"]
        assert service.ask("GET", "/healthz").status == 200
        idle = [stack.enter_context(service.connect()) for _ in range(400)]
        said = b""
        while piece := idle[-1].recv(1000):
            said += piece
        assert said.startswith(b"HTTP/1.1 503 ") and b"too many connections" in said
        assert service.end() == 0  # with all of them open
    assert not any("internal" in line for line in service.log), service.log

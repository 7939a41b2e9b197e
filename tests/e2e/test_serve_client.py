"""`submit`, `status`, `cancel` and `retry` ask the service of the state folder, or of an address."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Agent
from files import SMALL
from service import ASKS, Service, answer, asked
from service import serve as serve  # a fixture

TOKEN = "0123456789abcdef-token"


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(SMALL)
    return path


def test_submitted_file_is_verified(agent: Agent, serve: Callable[..., Service], forward: Path) -> None:
    serve()
    done = agent(
        "submit",
        forward,
        "--state",
        "state",
        "--wait",
        "--json",
        "--no-optimise",
        "--topk",
        "2",
        "--priority",
        "5",
    )
    assert done.code == 0, done.err
    assert (done.result["name"], done.result["verdict"]) == ("scale.py", "verified")
    assert done.result["options"] == {"no-optimise": "true", "topk": "2"} and done.result["priority"] == 5
    one = agent("status", done.result["id"], "--state", "state", "--json")
    assert one.result == done.result
    listed = agent("status", "--state", "state")
    assert done.result["id"] in listed.out and "verified" in listed.out and "scale.py" in listed.out
    forward.write_text("x = 1\n")
    unusable = agent("submit", forward, "--state", "state", "--wait")
    assert unusable.code == 3 and "unusable" in unusable.out


def test_cancelled_run_is_told_and_tried_again(
    agent: Agent, serve: Callable[..., Service], forward: Path
) -> None:
    serve(*ASKS)
    run = agent("submit", forward, "--state", "state", "--json").result
    assert run["state"] == "queued"
    asked(agent, 1)
    ended = agent("cancel", run["id"], "--state", "state")
    assert ended.code == 0 and "cancelled" in ended.out
    again = agent("cancel", run["id"], "--state", "state")
    assert again.code == 2 and "is cancelled" in again.err and "HTTP 409" in again.err
    waiting = agent.start("retry", run["id"], "--state", "state", "--wait", "--json")
    asked(agent, 2)
    early = agent("retry", run["id"], "--state", "state")
    assert early.code == 2 and "only one that has ended can be" in early.err
    answer(agent, 2)
    said, err = waiting.communicate()
    assert waiting.returncode == 0, err
    once_more = json.loads(said)
    assert (once_more["verdict"], once_more["attempt"]) == ("verified", 2)


def test_port_is_asked_with_the_token_and_past_any_proxy(
    agent: Agent, serve: Callable[..., Service], forward: Path
) -> None:
    token = agent.folder / "token"
    token.write_text(TOKEN)
    service = serve("--address", "127.0.0.1:0", "--token-file", str(token), *ASKS)
    proxy = {"http_proxy": "http://127.0.0.1:9", "all_proxy": "http://127.0.0.1:9"}
    asks = ("status", "--address", service.address, "--json")
    assert agent(*asks, "--token-file", token, env=proxy).result == {"runs": [], "total": 0}
    nobody = agent(*asks, env=proxy)
    assert nobody.code == 2 and "HTTP 401" in nobody.err


def test_what_cannot_be_asked_is_said(agent: Agent, serve: Callable[..., Service], forward: Path) -> None:
    nobody = agent("status", "--state", "state")
    assert nobody.code == 2 and "no service runs with the state folder" in nobody.err
    gone = agent("status", "--address", "unix:nowhere")
    assert gone.code == 2 and "no service there" in gone.err
    serve(*ASKS)
    for words, text in (
        (("status", "../x"), "is no run's id"),
        (("status", "0" * 16), "there is no such run"),
        (("cancel",), "ID is missing"),
        (("retry",), "ID is missing"),
        (("submit", "nowhere.py"), "nowhere.py"),
        (("submit", str(forward), "--out", "x"), "'out' is not for clients to set"),
    ):
        refused = agent(*words, "--state", "state")
        assert refused.code == 2 and text in refused.err, refused.err

"""Answers that cannot be used: the model is shown what it said and why that is no use, also after a
restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Endpoint
from files import BACKWARD, FORWARD, MEND, RAISES, WRONG, fenced

WEATHER = "I would rather talk about the weather."
BAD_PATCH = MEND.replace("M, N = x.shape", "M, N = y.shape")


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


def messages(model: Endpoint, at: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(model.requests()[at]["body"])["messages"]
    return found


def test_unusable_answers_are_read_back(
    agent: Agent, forward: Path, endpoint: Callable[..., Endpoint]
) -> None:
    model = endpoint(
        [
            {"text": WEATHER},
            {"text": fenced(RAISES)},
            {"tool": "submit_patch", "arguments": {"patch": BAD_PATCH}},
            {"tool": "submit_patch", "arguments": {"patch": MEND}},
            {"text": fenced(BACKWARD)},
        ]
    )
    done = agent(
        "--file-path", forward, "--base-url", model.url, "--draft", "llm", "--patience-perf", "1", "--json"
    )
    assert done.code == 0, done.err
    assert [message["role"] for message in messages(model, 0)] == ["system", "user"]

    said, problem = messages(model, 1)[2:]
    assert (said["role"], said["content"]) == ("assistant", WEATHER)
    assert problem["role"] == "user" and "no code" in problem["content"]

    assert len(messages(model, 2)) == 2, "a good answer ends the matter"

    said, problem = messages(model, 3)[2:]
    [call] = said["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"patch": BAD_PATCH}
    assert problem["role"] == "tool" and problem["tool_call_id"] == call["id"]
    assert "M, N = y.shape" in problem["content"]


def test_resumed_run_asks_the_same_again(agent: Agent, forward: Path) -> None:
    box = ["--file-path", str(forward), "--backend", "mailbox:box", "--draft", "llm", "--no-wait"]
    assert agent(*box).code == 75
    first = next((agent.folder / "box").glob("*-001.request.md"))
    Path(str(first).replace(".request.", ".answer.")).write_text(WEATHER)
    assert agent(*box, "--resume").code == 75
    second = next((agent.folder / "box").glob("*-002.request.md"))
    asked = second.read_text()
    assert WEATHER in asked and "no code" in asked
    second.unlink()
    assert agent(*box, "--resume").code == 75
    assert second.read_text() == asked


def test_moves_that_fail_have_one_turn_to_be_repaired_and_are_told_as_rolled_back(
    agent: Agent, forward: Path, endpoint: Callable[..., Endpoint]
) -> None:
    again = WRONG.replace("range(0, 1)", "range(0, 2)")
    model = endpoint(
        [
            {"text": fenced(BACKWARD)},
            {"text": "All in one loop.\n\n" + fenced(WRONG)},
            {"text": "Mended.\n\n" + fenced(again)},
            {"text": WEATHER},
        ],
        "--repeat",
    )
    agent("--file-path", forward, "--base-url", model.url, "--draft", "llm", "--patience-perf", "2", "--json")
    first, repair, after = (messages(model, i)[1]["content"] for i in (1, 2, 3))
    assert "one turn to be mended" in repair and "the gradient of w" in repair.partition("# What is wrong")[2]
    tried = repair.partition("# Tried so far")[2].partition("# Your task")[0]
    assert "All in one loop." in tried and "rolled back" not in tried and "kept" not in tried
    told = after.partition("# Moves tried so far")[2].partition("# Your task")[0]
    for idea in ("All in one loop.", "Mended."):
        line = next(line for line in told.splitlines() if idea in line)
        assert "not verified" in line and "rolled back" in line and "the gradient of w" in line
    assert "rolled back" not in first.partition("# Moves tried so far")[2].partition("# Your task")[0]

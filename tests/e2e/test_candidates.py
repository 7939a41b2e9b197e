"""Several questions a turn, asked at once: each with a direction of its own, whatever becomes of the
others."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Ended, Endpoint, ended
from files import BACKWARD, ENOUGH, FORWARD, RAISES, WRONG, fenced

Start = Callable[..., Endpoint]

WORSE = WRONG.replace("dy = dy.contiguous()", "dy = dy.contigous()")  # raises as well
DIRECTIONS = [  # of the first four questions of a turn
    "Yours: one program owns",
    "Yours: each program takes several rows",
    "Yours: the reduction is split",
    "Yours: a kernel for each gradient",
]
PROSE = "I would rather talk about the weather."


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


def arguments(forward: Path, url: str, candidates: int, *more: str) -> list[str]:
    given = ["--file-path", str(forward), "--base-url", url, "--draft", "llm", "--no-optimise", "--json"]
    return [*given, "--no-retrieval", "--candidates", str(candidates), *more]


def steps(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to a draft turn: the first to the first question, and so on."""
    return [answer | {"when": [mark]} for mark, answer in zip(DIRECTIONS, answers, strict=False)]


def events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Of a journal that is being written the last line may be half there."""
    path = Path(run_dir) / "run.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def journal(run_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events(run_dir) if event["event"] == kind]


def awaits_after_a_check(run_dir: Path) -> bool:
    """The verdict is saved by then: the oracle has begun with the next check."""
    kinds = [event["event"] for event in events(run_dir)]
    return "verdict" in kinds and "child" in kinds[kinds.index("verdict") :]


def asked(model: Endpoint) -> list[str]:
    """The last message of each request, by its direction."""
    texts = [json.loads(request["body"])["messages"][-1]["content"] for request in model.requests()]
    return sorted(texts, key=lambda text: text[text.find("Yours: ") :])


def test_questions_of_a_turn_are_open_at_once__and_differ_in_their_direction_alone(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    one = {"text": fenced(WRONG), "together": 4}
    model = endpoint(steps(one, one, one | {"text": fenced(BACKWARD)}, one))
    done = agent(*arguments(forward, model.url, 4))
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert model.state()["most_open"] == 4
    assert done.result["attempts"] == 4 and done.result["llm"]["requests"] == 4
    assert "range(0, M)" in Path(done.result["pair"]).read_text()
    bodies = [json.loads(request["body"]) for request in model.requests()]
    assert len({json.dumps(body["messages"][0]) for body in bodies}) == 1
    heads, directions = zip(*(text.split("Yours: ") for text in asked(model)), strict=True)
    assert len(set(heads)) == 1 and len(set(directions)) == 4
    assert {event["question"] for event in journal(done.result["run_dir"], "answer")} == {1, 2, 3, 4}


def test_one_question_alone_has_no_direction(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([ENOUGH | {"reject": ["Yours: ", "# A direction"]}])
    assert agent(*arguments(forward, model.url, 1)).code == 5
    assert len(model.requests()) == 1 and model.state()["failures"] == []


def test_bad_answer_and_lost_endpoint_among_several__cost_their_own_candidates(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    lost = {"status": 404, "error": "no such model"}
    model = endpoint(steps({"text": PROSE}, lost, {"text": fenced(BACKWARD)}, {"text": fenced(RAISES)}))
    done = agent(*arguments(forward, model.url, 4))
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert done.result["attempts"] == 2 and "error" not in done.result
    assert [event["question"] for event in journal(done.result["run_dir"], "bad_answer")] == [1]
    assert "question 2 has no answer" in done.err and "no such model" in done.err
    assert len(model.requests()) == 4


def tried(agent: Agent, forward: Path, endpoint: Start, delays: list[float]) -> str:
    """What the fix turn after a draft turn of three is told of these, without what a seed decides."""
    draft = [{"text": fenced(WORSE)}, {"text": PROSE}, {"text": fenced(WRONG)}]
    timed = [answer | {"delay": delay} for answer, delay in zip(draft, delays, strict=True)]
    model = endpoint([*steps(*timed), ENOUGH], "--repeat")
    done = agent(*arguments(forward, model.url, 3))
    assert done.code == 5, done.err
    fixes = [text for text in asked(model) if "does not pass" in text]
    assert len(fixes) == 3 and sum("Yours: keep the schedule" in text for text in fixes) == 1
    assert all("range(0, 1)" in text.split("# Tried so far")[0] for text in fixes)
    told = fixes[0].split("# Tried so far")[1].split("# Your task")[0]
    return re.sub(r"\d+", "0", re.sub(r"; .*", "", told))


def test_what_the_others_taught_is_told__in_the_order_of_questions(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    told = tried(agent, forward, endpoint, [2, 1, 0])
    first, second, third = re.findall(r"^- (.*)$", told, re.MULTILINE)
    assert "one program owns" in first and "not verified" in first and "not kept" in first
    assert "How it differs from the current file:" in told and "dy.contigous()" in told
    assert "the answer was no use: There is no code in the answer" in second
    assert "the reduction is split" in third and ", kept" in third
    assert tried(agent, forward, endpoint, [0, 1, 2]) == told


def interrupted_among_answers(agent: Agent, command: list[str], how: signal.Signals) -> Path:
    """The run's folder, after it was ended with one of three answers judged."""
    process = agent.start(*command)
    while not any(map(awaits_after_a_check, agent.run_dirs())):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate()
    assert how == signal.SIGKILL or (process.returncode == 130 and "--resume" in err)
    return agent.run_dirs()[0]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_ended_in_the_middle_of_a_turn__asks_the_open_questions_again_in_the_same_words(
    agent: Agent, forward: Path, endpoint: Start, how: signal.Signals
) -> None:
    silent = {"fault": "silent", "seconds": 900}
    model = endpoint(steps(silent, {"text": fenced(WRONG), "together": 3}, silent))
    command = arguments(forward, model.url, 3)
    run_dir = interrupted_among_answers(agent, command, how)
    rest = endpoint(
        [{"text": fenced(WORSE), "when": DIRECTIONS[:1]}, {"text": fenced(BACKWARD), "when": DIRECTIONS[2:3]}]
    )
    command[command.index(model.url)] = rest.url
    done = agent(*command, "--resume")
    assert done.code == 0 and done.result["run_dir"] == str(run_dir), done.err
    assert done.result["attempts"] == 3 and done.result["llm"]["requests"] == 3
    before, after = asked(model), asked(rest)
    assert after == [text for text in before if DIRECTIONS[1] not in text]
    assert rest.state()["left"] == 0
    if how == signal.SIGKILL:
        again = agent("verify", run_dir, "--json")
        assert again.code == 0 and again.result["verdict"] == "verified", again.err


def test_no_answer_is_of_use__each_is_told_what_was_wrong_with_its_own(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    model = endpoint(
        [
            *steps({"text": PROSE + " Rain."}, {"text": PROSE + " Snow."}),
            {"text": fenced(BACKWARD), "when": [DIRECTIONS[0], "Rain."], "reject": ["Snow."]},
            {"text": fenced(RAISES), "when": [DIRECTIONS[1], "Snow."], "reject": ["Rain."]},
        ]
    )
    done = agent(*arguments(forward, model.url, 2))
    assert done.code == 0, done.err
    assert model.state()["failures"] == [] and model.state()["left"] == 0


def test_all_endpoints_lost__ends_with_code_5(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([{"status": 401, "error": "bad key"}], "--repeat")
    done = agent(*arguments(forward, model.url, 3))
    assert done.code == 5 and "bad key" in done.result["error"]["message"], done.err
    assert len(model.requests()) == 3


def test_questions_left__are_the_most_that_are_asked(agent: Agent, forward: Path, endpoint: Start) -> None:
    model = endpoint([{"text": fenced(RAISES)}, {"text": fenced(RAISES + "\n# Again.\n")}], "--repeat")
    done = agent(*arguments(forward, model.url, 2, "--max-iters", "3"))
    assert done.code == 4, done.err
    assert len(model.requests()) == 3


def in_box(agent: Agent, kind: str) -> list[Path]:
    return sorted((agent.folder / "box").glob(f"*.{kind}.md"))


def put(request: Path, text: str) -> None:
    answer = request.with_name(request.name.replace(".request.", ".answer."))
    beside = answer.with_suffix(".new")
    beside.write_text(text)
    beside.rename(answer)


def test_mailbox__has_a_request_for_each__answered_in_any_order(agent: Agent, forward: Path) -> None:
    box = ["--file-path", str(forward), "--backend", "mailbox:box", "--draft", "llm", "--json"]
    box += ["--no-optimise", "--candidates", "3", "--no-wait"]
    first = agent(*box)
    assert first.code == 75, first.err
    requests = in_box(agent, "request")
    assert [path.name[-15:] for path in requests] == [f"-00{i}.request.md"[-15:] for i in (1, 2, 3)]
    assert [mark in path.read_text() for mark, path in zip(DIRECTIONS, requests, strict=False)] == [True] * 3
    put(requests[2], fenced(RAISES))
    second = agent(*box, "--resume")
    assert second.code == 75 and second.result["attempts"] == 1, second.err
    assert second.result["request"] == str(requests[0])
    put(requests[0], PROSE)
    put(requests[1], fenced(BACKWARD))
    last = agent(*box, "--resume")
    assert last.code == 0 and last.result["attempts"] == 2, last.err
    assert len(in_box(agent, "request")) == 3


def test_mailbox_while_waiting__takes_answers_as_they_come(agent: Agent, forward: Path) -> None:
    process = agent.start(
        *("--file-path", forward, "--backend", "mailbox:box", "--draft", "llm", "--json", "--no-optimise"),
        *("--candidates", "2"),
    )
    while len(in_box(agent, "request")) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    put(in_box(agent, "request")[1], fenced(RAISES))
    while not any(journal(run_dir, "verdict") for run_dir in agent.run_dirs()):
        time.sleep(0.05)
    put(in_box(agent, "request")[0], fenced(BACKWARD))
    out, err = process.communicate()
    done: Ended = ended(process.returncode, out, err)
    assert done.code == 0 and done.result["attempts"] == 2, done.err

"""What one run learned from a mistake is shown to the next that makes it, and dropped where it is in vain."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Agent, Ended, Endpoint, start_endpoint
from files import BACKWARD, ENOUGH, FORWARD, MEND, PATCH, RAISES, WRONG, fenced

Start = Callable[..., Endpoint]

HEADING = "# What mended the like before"
EARLY = "# Mistakes in similar backwards"
CHANGE = "-    for row in range(0, 1):\n+    for row in range(0, M):\n"
OTHER = FORWARD.replace("scale", "stretch")  # another file of the same family


def renamed(code: str) -> str:
    return code.replace("scale", "stretch").replace("Scale", "Stretch")


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


@pytest.fixture
def other(agent: Agent) -> Path:
    path = agent.folder / "stretch.py"
    path.write_text(OTHER)
    return path


def run(agent: Agent, file: Path, url: str, *more: str) -> Ended:
    return agent("--file-path", file, "--base-url", url, "--draft", "llm", "--no-optimise", "--json", *more)


def lessons(agent: Agent) -> list[dict[str, Any]]:
    done = agent("store", "lessons", "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def asked(model: Endpoint, since: int = 0) -> list[str]:
    """The user message of each question."""
    return [json.loads(request["body"])["messages"][1]["content"] for request in model.requests()[since:]]


# What raises in the first call is judged in no time: the mistake of all tests that do not ask what is kept.
FIRST = [{"text": fenced(RAISES)}, {"tool": "submit_patch", "arguments": {"patch": MEND}}]
RAISED = "-        dy = dy.contigous()\n+        dy = dy.contiguous()\n"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home in which a run has learned, and the endpoint that it asked."""
    agent = Agent(tmp_path_factory.mktemp("first"))
    file = agent.folder / "scale.py"
    file.write_text(FORWARD)
    model = start_endpoint(agent.folder, FIRST)
    done = run(agent, file, model.url)
    model.stop()
    assert done.code == 0, done.err
    return agent.folder, model.url


@pytest.fixture
def taught(agent: Agent, first: tuple[Path, str]) -> str:
    """The test's home has a lesson, of a run that asked the endpoint that is returned."""
    shutil.copytree(first[0] / ".local", agent.folder / ".local")
    assert len(lessons(agent)) == 1
    return first[1]


def test_lesson_of_one_run__is_shown_in_another_that_needs_it(
    agent: Agent, forward: Path, other: Path, endpoint: Start
) -> None:
    again = [{"text": fenced(renamed(WRONG))}, {"text": fenced(renamed(BACKWARD))}]
    mistake = [{"text": fenced(WRONG)}, {"tool": "submit_patch", "arguments": {"patch": PATCH}}]
    model = endpoint([*mistake, *again, again[0], ENOUGH])
    assert lessons(agent) == []
    first = run(agent, forward, model.url)
    assert first.code == 0 and "learned: what mended" in first.err, first.err
    assert all(HEADING not in text and EARLY not in text for text in asked(model))

    (lesson,) = lessons(agent)
    assert lesson["change"] == CHANGE and lesson["run"] == Path(first.result["run_dir"]).name
    assert lesson["kind"].startswith("wrong gradient, ") and "the gradient of w" in lesson["finding"]
    assert (lesson["shown"], lesson["helped"], lesson["vain"]) == (0, 0, 0)
    assert lesson["device"] == "cpu, for sm_90"
    kept = json.dumps(lesson)
    assert str(agent.folder) not in kept and model.url not in kept and "tl.load(x_ptr" not in kept

    told = run(agent, other, model.url)
    assert told.code == 0, told.err
    draft, fix = asked(model, 2)
    assert f"{EARLY}\n" in draft and CHANGE in draft and HEADING not in draft
    assert f"{HEADING}\n" in fix and CHANGE in fix and lesson["finding"] in fix
    (lesson,) = lessons(agent)
    assert (lesson["shown"], lesson["helped"], lesson["vain"]) == (1, 1, 0)

    silent = run(agent, other, model.url, "--no-lessons")
    assert silent.code == 5 and len(asked(model, 4)) == 2, silent.err
    assert all(HEADING not in text and EARLY not in text for text in asked(model, 4))
    assert lessons(agent) == [lesson]
    assert model.state()["left"] == 0


def test_lesson_shown_in_vain_in_three_runs__is_dropped(
    agent: Agent, forward: Path, other: Path, endpoint: Start
) -> None:
    texts = [RAISES, RAISES.replace("contigous", "contigously"), RAISES]
    vain = [{"text": fenced(renamed(text))} for text in texts]
    model = endpoint([*FIRST, *vain, *vain, *vain])
    assert run(agent, forward, model.url).code == 0
    for count in (1, 2, 3):
        before = len(model.requests())
        done = run(agent, other, model.url, "--max-iters", "3")
        assert done.code == 4, done.err
        draft, first, second = asked(model, before)
        assert RAISED in draft and RAISED in first
        assert RAISED not in second.split("# Tried so far")[0]  # once a run is enough
        assert [(lesson["vain"], lesson["shown"]) for lesson in lessons(agent)] == (
            [(count, count)] if count < 3 else []
        )


def test_another_endpoint__is_not_shown_what_the_first_was_sent(
    agent: Agent, taught: str, other: Path, endpoint: Start
) -> None:
    stranger = endpoint([{"text": fenced(renamed(RAISES))}, ENOUGH])
    assert stranger.url != taught and run(agent, other, stranger.url).code == 5
    assert len(asked(stranger)) == 2
    assert all(RAISED not in text.split("# Tried so far")[0] for text in asked(stranger))


def test_prompt_command__shows_lessons_with_their_tokens_and_counts_nothing(
    agent: Agent, taught: str, other: Path
) -> None:
    before = lessons(agent)
    given = ["prompt", other, "--draft", "llm", "--base-url", taught, "--json"]
    done = agent(*given)
    assert done.code == 0, done.err
    parts = {part["name"]: part["tokens"] for part in done.result["parts"]}
    assert 50 < parts["lessons"] < 400
    assert RAISED in done.result["messages"][1]["content"]
    assert "lessons" not in {part["name"] for part in agent(*given, "--no-lessons").result["parts"]}
    assert lessons(agent) == before


def test_lessons_are_listed_and_forgotten(agent: Agent, first: tuple[Path, str]) -> None:
    assert agent("store", "lessons").out == ""
    shutil.copytree(first[0] / ".local", agent.folder / ".local", dirs_exist_ok=True)
    (lesson,) = lessons(agent)
    shown = agent("store", "lessons")
    assert f"{lesson['id']}  {lesson['kind']}; shown in 0 runs" in shown.out
    assert "     +        dy = dy.contiguous()" in shown.out and lesson["run"] in shown.out
    for words, what in {
        ("remember",): "usage: kernel-agent store lessons",
        ("forget",): "usage: kernel-agent store lessons",
        ("forget", "x"): "'x' is no number of a lesson",
        ("forget", "0"): "'0' is no number of a lesson",
        ("forget", "1", "x"): "'x' is no number of a lesson",
        ("forget", "99"): "no lesson 99",
    }.items():
        done = agent("store", "lessons", *words)
        assert done.code == 2 and what in done.err, done.err
    assert lessons(agent) == [lesson]
    done = agent("store", "lessons", "forget", str(lesson["id"]))
    assert done.code == 0 and done.out == "1 lesson forgotten\n"
    assert lessons(agent) == []
    assert agent("store", "lessons", "forget", "all", "--json").result == {"forgotten": 0}
    assert "neither XDG_DATA_HOME nor HOME" in agent("store", "lessons", env={"HOME": ""}).err


def spoil(path: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "damaged":
        path.write_bytes(b"no database at all" * 100)
    elif how == "a folder":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.write_text("a file where the folder has to be")


@pytest.mark.parametrize("how", ["damaged", "a folder", "no place"])
def test_lessons_that_cannot_be_kept__stop_no_run(
    agent: Agent, forward: Path, endpoint: Start, how: str
) -> None:
    path = agent.folder / ".local/share/kernel-agent/lessons.db"
    spoil(path, how)
    done = run(agent, forward, endpoint(FIRST).url)
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    assert done.err.count("going on without lessons of other runs") == 1, done.err
    assert how != "damaged" or path.read_bytes().startswith(b"no database")


def test_run_without_retrieval__neither_learns_nor_is_told(
    agent: Agent, forward: Path, endpoint: Start
) -> None:
    assert run(agent, forward, endpoint(FIRST).url, "--no-retrieval").code == 0
    assert lessons(agent) == []


def test_processes_and_runs_at_once__each_keep_theirs(agent: Agent, endpoint: Start) -> None:
    """Two processes, two runs each, whose mistakes differ."""
    folders = [agent.folder / "one", agent.folder / "two"]
    steps: list[dict[str, Any]] = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        for kind in ("a", "b"):
            name = f"{kind}{number}"
            (folder / f"{name}.py").write_text(FORWARD.replace("scale", f"scale_{name}"))
            right = BACKWARD.replace("scale", f"scale_{name}")
            wrong = right.replace("    dy = dy.contiguous()\n", f"    dy = dy.{name}()\n")
            broken = wrong if wrong != right else right.replace("return dx, dw", f"return {name}, dw")
            for text in (broken, right):
                steps.append({"text": fenced(text), "when": [f"scale_{name}_autograd"]})
    url = endpoint(steps).url
    done: list[Ended] = []

    def batch(folder: Path) -> None:
        given = ["--base-url", url, "--draft", "llm", "--no-optimise", "--jobs", "2"]
        done.append(agent("batch", folder, *given, "--out", str(folder / "out")))

    threads = [threading.Thread(target=batch, args=[folder]) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.code for one in done] == [0, 0], [one.err for one in done]
    found = lessons(agent)
    assert len(found) == len({lesson["run"] for lesson in found}) == 4, found

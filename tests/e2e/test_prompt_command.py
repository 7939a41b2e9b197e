"""`kernel-agent prompt`: what a run would ask the model first, without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Agent
from files import FORWARD

SORTED = FORWARD.replace("x * w, mask=mask)", "tl.sort(x) * w, mask=mask)")


@pytest.fixture
def forward(agent: Agent) -> Path:
    path = agent.folder / "scale.py"
    path.write_text(FORWARD)
    return path


def test_draft_question__is_printed_with_its_parts_and_nothing_stays(agent: Agent, forward: Path) -> None:
    done = agent("prompt", forward, "--draft", "llm", "--json")
    assert done.code == 0, done.err
    question = done.result
    system, user = question["messages"]
    assert (system["role"], user["role"], question["phase"]) == ("system", "user", "draft")
    tokens = {part["name"]: part["tokens"] for part in question["parts"]}
    assert list(tokens) == ["system", "forward", "inspect", "draft", "draft_report", "pairs", "instructions"]
    assert abs(sum(tokens.values()) - question["tokens"]) <= len(tokens)
    bytes_sent = len((system["content"] + user["content"]).encode())
    assert question["tokens"] == int(bytes_sent / question["bytes_per_token"]) + 1 < question["budget"]
    number = FORWARD.splitlines().index("def scale(x, w):") + 1
    assert f"\n{number:4}| def scale(x, w):\n" in user["content"]
    assert "submit_patch" in system["content"] and str(agent.folder) not in user["content"]
    assert sorted(path.name for path in agent.folder.iterdir() if path.name[0] != ".") == ["scale.py"]


def test_question_after_the_differentiators_draft__is_about_its_schedule(agent: Agent, forward: Path) -> None:
    done = agent("prompt", forward, "--backend", "mailbox:box")
    assert done.code == 0, done.err
    assert done.out.startswith("==== system ====\n") and "\n==== user ====\n" in done.out
    assert "# Your task\n\nMake the backward part faster" in done.out
    assert "one fenced `python` block" in done.out and "Call a tool" not in done.out
    assert "optimise question, about " in done.err and "(bytes / 3.5)" in done.err
    assert any(line.split()[1:] == ["candidate"] for line in done.err.splitlines())
    assert not (agent.folder / "box").exists()


def test_run_without_a_question__says_so(agent: Agent, forward: Path) -> None:
    done = agent("prompt", forward, "--no-optimise")
    assert done.code == 0 and not done.out
    assert "no question: the draft of the differentiator is verified" in done.err


def test_refused_draft__is_spoken_of_as_none(agent: Agent) -> None:
    path = agent.folder / "sorted.py"
    path.write_text(SORTED)
    done = agent("prompt", path, "--json")
    assert done.code == 0, done.err
    user = done.result["messages"][1]["content"]
    assert done.result["phase"] == "draft" and "There is no draft" in user and "tl.sort" in user
    assert "mechanical draft" not in user and "Its report" not in user
    assert "draft" not in {part["name"] for part in done.result["parts"]}


def test_forward_that_cannot_be_used__is_named(agent: Agent) -> None:
    path = agent.folder / "broken.py"
    path.write_text("def f(:\n")
    done = agent("prompt", path)
    assert done.code == 3 and "broken.py" in done.err and not done.out
    missing = agent("prompt", agent.folder / "none.py")
    assert missing.code == 3 and json.dumps("none.py")[1:-1] in missing.err
    assert agent("prompt").code == 2


def test_folder_that_cannot_be_made__is_named_with_a_remedy(agent: Agent, forward: Path) -> None:
    done = agent("prompt", forward, env={"TMPDIR": "/nonexistent"})
    assert done.code == 2 and "/nonexistent/" in done.err and "set TMPDIR" in done.err


def test_question_about_speed__has_the_kernels_of_the_users_own_sizes(agent: Agent, forward: Path) -> None:
    text = forward.read_text()
    own = text.replace('SWEEP = [{"M": 4, "N": 24}, {"M": 3, "N": 33}]', 'SWEEP = [{"M": 4096, "N": 512}]')
    assert own != text
    forward.write_text(own)
    done = agent("prompt", forward, "--backend", "mailbox:box")
    assert done.code == 0, done.err
    table = done.out.partition("# Where it stands")[2].partition("# Your task")[0]
    blocks = {int(block) for block in re.findall(r"BLOCK=(\d+)", table)}
    assert 512 in blocks and min(blocks) < 512, table

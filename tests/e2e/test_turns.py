"""A mistake that once cost the most turns costs one less: by a rule that it is not made, or by a fact that it
is mended at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Agent, Endpoint

sys.path.insert(0, str(ROOT / "tests" / "llm"))
from turns import FORWARD, KINDS


def questions(agent: Agent, model: Endpoint, *more: str) -> int:
    file = agent.folder / "scale.py"
    file.write_text(FORWARD)
    options = ("--draft", "llm", "--no-optimise", "--no-retrieval", "--json")
    done = agent("--file-path", file, "--base-url", model.url, *options, *more)
    assert done.code == 0, done.err
    return len(model.requests())


def prompts_without(folder: Path, rule: str) -> Path:
    """The prompts, in which the rule says nothing."""
    folder.mkdir()
    for path in (ROOT / "prompts").glob("*.md"):
        lines = path.read_text().splitlines(keepends=True)
        at = next((n for n, line in enumerate(lines) if line.startswith(rule)), None)
        if path.name == "system.md":
            assert at is not None, rule
            end = next(n for n in range(at + 1, len(lines)) if not lines[n].startswith("   "))
            lines[at:end] = [rule.partition(" ")[0] + " Write what is right.\n"]
        (folder / path.name).write_text("".join(lines))
    return folder


@pytest.mark.parametrize("name", KINDS)
def test_mistake_costs_as_many_questions_as_it_should(
    agent: Agent, endpoint: Callable[..., Endpoint], name: str
) -> None:
    kind = KINDS[name]
    assert kind.then == kind.now + 1
    assert questions(agent, endpoint(kind.steps)) == kind.now


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.without])
def test_without_the_rule__it_costs_one_more(
    agent: Agent, endpoint: Callable[..., Endpoint], tmp_path: Path, name: str
) -> None:
    kind = KINDS[name]
    prompts = prompts_without(tmp_path / "prompts", kind.without)
    assert questions(agent, endpoint(kind.steps), "--prompts", str(prompts)) == kind.then

"""The table of kinds in C and the tables in Python are about the same kinds."""

import re
from pathlib import Path

from kernel_agent import draw
from kernel_agent.operations import candidate

ROOT = Path(__file__).resolve().parents[2]
# What says how a case is run, before there is a graph to ask about: which gradients, which order of programs.
NOT_DONE_BY_QUESTIONS = {"needs", "order"}


def rows(sort: str) -> list[str]:
    """Names in the table of agent/core/kinds.c, each once."""
    text = (ROOT / "agent/core/kinds.c").read_text()
    return list(dict.fromkeys(re.findall(rf'^ {{4}}\{{"(\w+)", KA_KIND_{sort},', text, re.MULTILINE)))


def test_kinds__upstreams_and_inputs__are_drawn_by_one_function_each():
    assert set(rows("UPSTREAM")) == set(draw.UPSTREAMS)
    assert rows("INPUTS") == list(draw.INPUTS), "preflight tries them in this order"


def test_kinds__questions__are_answered_by_the_candidate_and_judged():
    questions = set(rows("QUESTION")) - NOT_DONE_BY_QUESTIONS
    assert questions == set(candidate.QUESTIONS)
    judged = (ROOT / "agent/run/judge.c").read_text().partition("} QUESTIONS[] = {")[2].partition("};")[0]
    assert questions == set(re.findall(r'\{"(\w+)", judge_\w+\}', judged))


def test_kinds__every_one__is_in_the_protocol():
    text = (ROOT / "docs/protocol.md").read_text()
    names = [name for sort in ("UPSTREAM", "INPUTS", "QUESTION") for name in rows(sort)]
    assert [name for name in names if f"`{name}`" not in text] == []

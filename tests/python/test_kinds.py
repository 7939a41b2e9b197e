"""The table of kinds in C and the tables in Python are about the same kinds."""

import re
from pathlib import Path

from kernel_agent import draw, vary
from kernel_agent.operations import questions

ROOT = Path(__file__).resolve().parents[2]
# What says how a case is run, before there is a graph to ask about: which gradients, which order of programs.
NOT_DONE_BY_QUESTIONS = {"needs", "order"}


def rows(sort: str) -> list[str]:
    """Names in the table of agent/core/kinds.c, each once."""
    text = (ROOT / "agent/core/kinds.c").read_text()
    return list(dict.fromkeys(re.findall(rf'^ {{4}}\{{"(\w+)", KA_KIND_{sort},', text, re.MULTILINE)))


def test_kinds__upstreams_layouts_and_values__are_done_by_one_function_each():
    assert set(rows("UPSTREAM")) == set(draw.UPSTREAMS)
    assert rows("LAYOUT") == list(vary.LAYOUTS) and rows("VALUES") == list(vary.VALUES)


def test_kinds__layouts_and_values__have_a_row_that_says_which_tensors_they_suit():
    table = (ROOT / "agent/core/vary.c").read_text().partition("} CHOICES[] = {")[2].partition("};")[0]
    drawn = rows("LAYOUT, KA_KIND_TAKEN") + rows("VALUES, KA_KIND_TAKEN")
    drawn.remove("unsqueezed")  # of all inputs of a shape at once, whatever else there is
    assert re.findall(r'\{"(\w+)", ', table) == drawn and len(drawn) >= 12


def test_kinds__questions__are_answered_by_the_candidate_and_judged():
    asked = set(rows("QUESTION")) - NOT_DONE_BY_QUESTIONS
    assert asked == set(questions.QUESTIONS)
    judged = (ROOT / "agent/run/judge.c").read_text().partition("} QUESTIONS[] = {")[2].partition("};")[0]
    assert asked == set(re.findall(r'\{"(\w+)", judge_\w+\}', judged))


def test_kinds__every_one__is_in_the_protocol():
    text = (ROOT / "docs/protocol.md").read_text()
    names = [name for sort in ("UPSTREAM", "LAYOUT", "VALUES", "QUESTION") for name in rows(sort)]
    assert [name for name in names if f"`{name}`" not in text] == []

"""tests/llm/facts.py: a fact that a question lacks is told, and every recorded conversation has its facts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

LLM = Path(__file__).resolve().parents[1] / "llm"
sys.path.insert(0, str(LLM))
from facts import Fact, facts_of, missing

DIMS = Fact(re.compile(r"M=\d+"), "the size")


@pytest.mark.parametrize(
    ("turns", "questions", "told"),
    [
        ([[DIMS]], ["on M=8"], []),
        ([[DIMS]], ["on M=?"], [r"question 1 lacks /M=\d+/: the size"]),
        ([[DIMS], [DIMS]], ["on M=8", ""], [r"question 2 lacks /M=\d+/: the size"]),
        ([[]], ["on M=8"], ["question 1 has no facts"]),
        ([[DIMS]], ["on M=8", "again"], ["facts are listed for 1 questions, 2 were asked"]),
    ],
)
def test_what_a_question_lacks_is_told(
    turns: list[list[Fact]], questions: list[str], told: list[str]
) -> None:
    assert list(missing(turns, questions)) == told


def test_each_conversation_has_facts_for_each_question() -> None:
    conversations = {path.stem for path in (LLM / "transcripts").glob("*.jsonl")}
    assert {path.stem for path in (LLM / "facts").glob("*.toml")} == conversations
    for name in conversations:
        answers = (LLM / "transcripts" / f"{name}.jsonl").read_text().splitlines()[1:]
        assert [bool(facts) for facts in facts_of(name)] == [True] * len(answers), name

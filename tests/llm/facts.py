"""What a question must hold to be answered: tests/llm/facts/NAME.toml for each recorded conversation.

A file has a [[turn]] for each question, in order; a turn has any number of [[turn.fact]], each with `text`, a
regular expression that must be found in the question, and `why`, what it was needed for. A question is the
text of all its messages.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FACTS = Path(__file__).resolve().parent / "facts"


class Fact(NamedTuple):
    text: re.Pattern[str]
    why: str


def facts_of(name: str) -> list[list[Fact]]:
    """The facts of each turn of a conversation. OSError where it has none, KeyError for half a fact."""
    turns = tomllib.loads((FACTS / f"{name}.toml").read_text()).get("turn", [])
    return [[Fact(re.compile(f["text"]), f["why"]) for f in turn.get("fact", [])] for turn in turns]


def missing(turns: list[list[Fact]], questions: list[str]) -> Iterator[str]:
    """A sentence for each fact that its question lacks, and for turns that have no facts or no question."""
    if len(turns) != len(questions):
        yield f"facts are listed for {len(turns)} questions, {len(questions)} were asked"
    for number, (facts, question) in enumerate(zip(turns, questions, strict=False), start=1):
        if not facts:
            yield f"question {number} has no facts"
        for fact in facts:
            if not fact.text.search(question):
                yield f"question {number} lacks /{fact.text.pattern}/: {fact.why}"

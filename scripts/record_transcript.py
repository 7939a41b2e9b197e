#!/usr/bin/env python3
"""A finished run as a script for tests/llm/server.py, so that a test can repeat its course over real HTTP.

    record_transcript.py RUN_DIR [-- OPTIONS ...] > tests/llm/transcripts/NAME.jsonl

The first line is {"comment", "forward", "name", "options"}: what was completed, and with which OPTIONS of
kernel-agent; the server skips it. Every further line is one answer of the model, in order, with `expect` and
`reject`: texts that prove that the right question is being answered when it is played back. They are taken
from the recorded question, and only what stays the same from run to run: sentences of the verdict without
digits (seeds and errors change), why the last answer was unusable, and code lines that tell the shown
candidate from all others, so that a roll-back that is forgotten is noticed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Event = dict[str, Any]
SHORTEST = 20  # characters of a text that proves something
MOST_SENTENCES = 3


def read_events(run_dir: Path) -> list[Event]:
    """The journal's events; a last line that a crash has cut is left out."""
    events = []
    for line in (run_dir / "run.jsonl").read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def stable_sentences(text: str) -> list[str]:
    """Parts of the text between full stops and line ends that hold no digit, the first few different ones."""
    found: list[str] = []
    for sentence in re.split(r"(?<=[.:;])\s|\n", text):
        sentence = sentence.strip(" -")
        if len(sentence) >= SHORTEST and not re.search(r"\d", sentence) and sentence not in found:
            found.append(sentence)
    return found[:MOST_SENTENCES]


def telling_line(code: str, others: list[str]) -> str | None:
    """The longest line of the code that occurs in none of the other texts."""
    lines = (line.strip() for line in code.splitlines())
    own = [line for line in lines if len(line) >= SHORTEST and not any(line in other for other in others)]
    return max(own, key=len) if own else None


class Course:
    """What has happened up to the answer that is being written."""

    def __init__(self) -> None:
        self.entry = ""
        self.questions: dict[int, str] = {}
        self.question = ""  # that of the answer
        self.facts = ""
        self.bad: tuple[str, str] | None = None  # the last answer, if it was unusable, and why
        self.candidates: list[str] = []

    def expectations(self) -> dict[str, list[str]]:
        seen = self.question + (self.bad[0] if self.bad else "")
        expect = [self.entry] + [text for text in stable_sentences(self.facts) if text in self.question]
        reject: list[str] = []
        if self.bad:
            answer, problem = self.bad
            expect += [text for text in (answer.strip().splitlines() or [""])[:1] if text]
            expect += stable_sentences(problem)[:1]
        for code in set(self.candidates):
            others = [other for other in self.candidates if other != code]
            line = telling_line(code, others if code in self.question else [seen])
            if line:
                (expect if code in self.question else reject).append(line)
        return {name: texts for name, texts in (("expect", expect), ("reject", sorted(set(reject)))) if texts}

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "inspected":
            self.entry = event["stub"]["name"] + "_autograd"
        elif kind == "prompt":
            self.questions[event["question"]] = "\n".join(m["content"] for m in event["messages"])
        elif kind == "verdict":
            self.facts = event["verdict"].get("facts", "")
        elif kind == "candidate":
            self.candidates.append(event["backward"].strip())
            self.bad = None
        elif kind == "answer":
            self.bad = (event.get("text") or "", "")
        elif kind == "bad_answer" and self.bad:
            self.bad = (self.bad[0], event["problem"])


def step_of(answer: Event) -> Event:
    step: Event = {"text": answer["text"]} if answer.get("text") else {}
    if answer.get("refusal"):
        return {"fault": "refusal"}
    for call in answer.get("calls", [])[:1]:
        step |= {"tool": call["name"], "arguments": call["arguments"]}
    return step


def transcript(events: list[Event], options: list[str]) -> list[Event]:
    start = next(event for event in events if event["event"] == "start")
    entry = {
        "comment": "kernel-agent " + " ".join(options),
        "name": Path(start["file"]).stem,
        "options": options,
    }
    steps: list[Event] = [entry | {"forward": start["forward"]}]
    course = Course()
    for event in events:
        if event["event"] == "answer":
            course.question = course.questions[event["question"]]
            direction = re.search(r"Yours: [^.]*", course.question)
            when = {"when": [direction[0]]} if direction else {}  # asked beside others
            steps.append(step_of(event) | when | course.expectations())
        course.take(event)
    return steps


def main() -> int:
    if len(sys.argv) < 2 or (len(sys.argv) > 2 and sys.argv[2] != "--"):
        print(__doc__, file=sys.stderr)
        return 2
    for step in transcript(read_events(Path(sys.argv[1])), sys.argv[3:]):
        print(json.dumps(step, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())

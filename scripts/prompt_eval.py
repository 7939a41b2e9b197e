#!/usr/bin/env python3
"""Replays the recorded conversations of tests/llm, and looks for the facts that each question must hold.

    scripts/prompt_eval.py [--build build] [NAME ...]

A replay is a whole run with real checks, its model the scripted endpoint with the recorded answers; each
question that the program makes on the way is held against tests/llm/facts/NAME.toml. Prints a line a
question with its size, and what is missing with the reason why it was needed. Exits with 1 where anything is
missing, or a run took another course than the recorded one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLM = ROOT / "tests" / "llm"
sys.path.insert(0, str(LLM))
from facts import Fact, facts_of, missing  # noqa: E402


def questions_of(log: Path) -> list[str]:
    """The text of each question that the endpoint was asked, in order."""
    bodies = [json.loads(json.loads(line)["body"]) for line in log.read_text().splitlines()]
    return ["\n".join(m["content"] for m in body["messages"]) for body in bodies]


def replay(transcript: Path, build: Path, folder: Path) -> tuple[list[str], list[str]]:
    """The questions of a replay, and what was wrong with its course."""
    head = json.loads(transcript.read_text().splitlines()[0])
    forward, log = folder / f"{head['name']}.py", folder / "log"
    forward.write_text(head["forward"])
    server = [sys.executable, str(LLM / "server.py"), "--script", str(transcript), "--log", str(log)]
    endpoint = subprocess.Popen([*server, "--seconds", "900"], stdout=subprocess.PIPE, text=True)
    try:
        assert endpoint.stdout is not None
        url = f"http://127.0.0.1:{endpoint.stdout.readline().strip()}/v1"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))}
        place = {"HOME": str(folder), "KA_SHARE": str(ROOT), "KA_STORE": str(build / "pairs.db")}
        command = [
            build / "kernel-agent",
            "--file-path",
            forward,
            "--base-url",
            url,
            "--quiet",
            *head["options"],
        ]
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env={**kept, **place}, stdout=subprocess.DEVNULL, check=False
        )
    finally:
        endpoint.terminate()
        endpoint.wait()
    requests: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    wrong = [text for request in requests for text in request["failed"]]
    return questions_of(log), wrong + ([f"exit code {done.returncode}"] if done.returncode else [])


def told(name: str, turns: list[list[Fact]], questions: list[str], wrong: list[str]) -> bool:
    """Print one conversation; was everything there?"""
    for number, (facts, question) in enumerate(zip(turns, questions, strict=False), start=1):
        found = sum(bool(fact.text.search(question)) for fact in facts)
        print(f"{name:28} question {number}  facts {found:2} of {len(facts):2}  {len(question):6} characters")
    lacks = [*missing(turns, questions), *wrong]
    for text in lacks:
        print(f"    {text}")
    return not lacks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("name", nargs="*", help="conversations to replay (all)")
    args = parser.parse_args()
    names = args.name or sorted(path.stem for path in (LLM / "transcripts").glob("*.jsonl"))
    good = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ka-prompt-") as folder:
            transcript = LLM / "transcripts" / f"{name}.jsonl"
            questions, wrong = replay(transcript, args.build.resolve(), Path(folder))
            good += told(name, facts_of(name), questions, wrong)
        sys.stdout.flush()
    print(f"{good} of {len(names)} conversations with every fact in its question")
    return 0 if good == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())

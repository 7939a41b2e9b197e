#!/usr/bin/env python3
"""How many questions three kinds of mistake cost. Prints one JSON object, with the questions and answers.

    scripts/bench_turns.py [--program build/kernel-agent] [--share .]

The kinds are those of tests/llm/turns.py: a scripted model makes each unless its question says better. With
the program and the files of another version it shows what the questions of that version are worth.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LLM = ROOT / "tests" / "llm"
sys.path[:0] = [str(LLM), str(ROOT / "scripts")]
import bounded  # noqa: E402
from turns import FORWARD, KINDS, RIGHT, Kind  # noqa: E402


def code_of(answer: str) -> str:
    return answer.partition("```python\n")[2].partition("```")[0]


def told(question: str) -> str:
    """What a question says of the failure; nothing in a first one."""
    return question.partition("\n# What is wrong\n")[2].partition("\n# ")[0].strip()


def mistake(answer: str) -> list[str]:
    """The lines in which an answer differs from the right one."""
    lines = difflib.unified_diff(RIGHT.splitlines(), code_of(answer).splitlines(), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def run(program: Path, share: Path, kind: Kind, folder: Path) -> dict[str, Any]:
    (folder / "scale.py").write_text(FORWARD)
    (folder / "script.jsonl").write_text("".join(json.dumps(step) + "\n" for step in kind.steps))
    server = [sys.executable, str(LLM / "server.py"), "--script", str(folder / "script.jsonl")]
    endpoint = subprocess.Popen([*server, "--seconds", "900"], stdout=subprocess.PIPE, text=True)
    try:
        assert endpoint.stdout is not None
        url = f"http://127.0.0.1:{endpoint.stdout.readline().strip()}/v1"
        command = [program, "--file-path", folder / "scale.py", "--base-url", url, "--model", "scripted"]
        command += ["--draft", "llm", "--no-optimise", "--no-retrieval", "--out", folder / "runs", "--quiet"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))}
        kept |= {"KA_SHARE": str(share), "HOME": str(folder)}
        done = subprocess.run(list(map(str, command)), env=kept, stdout=subprocess.DEVNULL, check=False)
    finally:
        endpoint.terminate()
        endpoint.wait()
    journal = next(folder.glob("runs/*/run.jsonl")).read_text().splitlines()
    events = [json.loads(line) for line in journal]
    asked = ["\n".join(m["content"] for m in e["messages"]) for e in events if e["event"] == "prompt"]
    answers = [event["text"] for event in events if event["event"] == "answer"]
    turns = [{"told": told(q), "mistake": mistake(a)} for q, a in zip(asked, answers, strict=False)]
    return {"questions": len(answers), "verified": done.returncode == 0, "turns": turns}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--share", type=Path, default=ROOT)
    args = parser.parse_args()
    kinds = {}
    for name, kind in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="ka-turns-") as folder:
            kinds[name] = run(args.program.resolve(), args.share.resolve(), kind, Path(folder))
    print(json.dumps({"machine": bounded.machine(), "kinds": kinds}, indent=1))
    return 0 if all(kind["verified"] for kind in kinds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

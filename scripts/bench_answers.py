#!/usr/bin/env python3
"""How long a model waits for the next question after each kind of answer. Prints one JSON object.

    scripts/bench_answers.py [--program build/kernel-agent] [--forward examples/rms_norm.py] [--device cpu]

A job runs against the scripted endpoint of tests/llm, whose answers are the differentiator's own backward
with one thing broken in each, and at last as it is: first one that counts for nothing, while interpreters
start, then a syntax error, a rule that is broken, a kernel that the target's compiler refuses, a raise in
every case, a wrong sign, and the right one. Seconds are from an answer's end to the next question, or to the
verdict of the last; they are read from the run's journal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import bounded  # noqa: E402

LOOP = "    for _ in range(0, 2):\n        if tl.program_id(0) < 0:\n            continue\n"


def backward_of(program: Path, forward: Path) -> str:
    """What the differentiator writes."""
    done = subprocess.run(
        [program, "differentiate", forward, "--print"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() + "\n"


def in_backward(code: str, line: str) -> str:
    """`line` as the first of the method that computes gradients."""
    return re.sub(r"(\n    def backward\(ctx[^\n]*\n)", rf"\1        {line}\n", code, count=1)


def in_kernel(code: str, lines: str) -> str:
    """`lines` at the end of the last kernel: after its last store."""
    at = code.rindex("tl.store(")
    end = code.index("\n\n", at) + 1
    return code[:end] + lines + code[end:]


def answers(code: str) -> dict[str, str]:
    """A name and a text for each."""
    last = code.rindex("tl.store(")
    value = code.index(", ", last) + 2
    return {
        "first": in_backward(code, "import os"),
        "syntax error": code.replace(
            "@staticmethod\n    def backward(ctx", "@staticmethod\n    def backward(ctx ctx"
        ),
        "broken rule": in_backward(code, "torch.matmul(ctx.saved_tensors[0], ctx.saved_tensors[0])"),
        "compile error": in_kernel(code, LOOP),
        "raise": in_backward(code, "raise RuntimeError('not written yet')"),
        "wrong": code[:value] + "-" + code[value:],
        "right": code,
    }


def run(program: Path, url: str, folder: Path, args: argparse.Namespace, turns: int) -> list[dict[str, Any]]:
    command = [
        program,
        "--file-path",
        args.forward,
        "--base-url",
        url,
        "--draft",
        "llm",
        "--model",
        "scripted",
    ]
    command += ["--max-iters", turns, "--patience-parity", turns + 1, "--out", folder / "runs", "--quiet"]
    command += ["--no-optimise", "--no-lessons", "--device", args.device]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "XDG_"))}
    kept |= {"KA_SHARE": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([str(part) for part in command], env=kept, stdout=subprocess.DEVNULL, check=False)
    journal = next(folder.glob("runs/*/run.jsonl"))
    return [json.loads(line) for line in journal.read_text().splitlines()]


def waits(events: list[dict[str, Any]]) -> list[float]:
    """Seconds from each answer to the next question, or of the last to the last verdict."""
    found, answered = [], None
    for event in events:
        if event["event"] == "llm":
            answered = event["t"]
        elif answered is not None and event["event"] == "prompt":
            found.append(round(event["t"] - answered, 2))
            answered = None
    last = [event["t"] for event in events if event["event"] == "verdict"]
    if answered is not None and last:
        found.append(round(last[-1] - answered, 2))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--forward", type=Path, default=ROOT / "examples" / "rms_norm.py")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    program = args.program.resolve()
    texts = answers(backward_of(program, args.forward))
    load = bounded.load()
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as name:
        folder = Path(name)
        steps = [{"text": f"```python\n{text}```\n"} for text in texts.values()]
        (folder / "script.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        server = [sys.executable, str(ROOT / "tests/llm/server.py"), "--script", str(folder / "script.jsonl")]
        endpoint = subprocess.Popen([*server, "--seconds", "600"], stdout=subprocess.PIPE, text=True)
        try:
            assert endpoint.stdout is not None
            port = endpoint.stdout.readline().strip()
            events = run(program, f"http://127.0.0.1:{port}/v1", folder, args, len(texts))
        finally:
            endpoint.terminate()
            endpoint.wait()
    found = waits(events)
    if len(found) != len(texts):
        print(f"of {len(texts)} answers {len(found)} were followed by a question", file=sys.stderr)
        return 1
    seconds = dict(zip(texts, found, strict=True))
    said = [event["verdict"]["verified"] for event in events if event["event"] == "verdict"]
    made = bounded.machine() | {"load_before": load, "load_after": bounded.load()}
    print(json.dumps({"machine": made, "forward": args.forward.name, "seconds": seconds, "verdicts": said}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

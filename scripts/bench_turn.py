#!/usr/bin/env python3
"""What a turn costs the daemon itself, outside of models and children. Prints one JSON object.

    scripts/bench_turn.py [--program build/kernel-agent] [--turns 8]

Runs one job against the scripted endpoint of tests/llm, whose model answers with a wrong backward, then with
patches that leave it wrong, so that every turn asks, composes, checks and judges. The journal says when a
child or an answer ended, and how long it took; the daemon's own time is the gap between one end and the next
start. Two clocks are read, both from the journal: these gaps, which on a busy machine include waiting for a
processor, and the processor time of the daemon's process (all its threads, user and kernel, without its
children) from one question to the next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from files import FORWARD, WRONG, fenced  # noqa: E402


def gaps_ms(events: list[dict[str, Any]]) -> list[float]:
    """Time from the end of a child or an answer to the start of the next child or question, in ms."""
    found, ended = [], None
    booting = {"inspect", "candidate"}  # the first of each waits for its interpreter to start: a child's time
    for event in events:
        started = event["t"] - event.get("ms", 0) / 1e3 if event["event"] in ("child", "prompt") else None
        boots = event["event"] == "child" and event["op"] in booting
        if boots:
            booting.discard(event["op"])
        if started is not None and ended is not None and not boots:
            found.append(max(0.0, (started - ended) * 1e3))
        if event["event"] in ("child", "llm"):
            ended = event["t"]
        elif event["event"] == "prompt":
            ended = None  # from here on it is the model's time
    return found


def processor_ms_by_turn(events: list[dict[str, Any]]) -> list[float]:
    """Processor time of each turn, from its question to the next one; the last to the end of the job."""
    marks = [event["cpu"] for event in events if event["event"] == "prompt"]
    marks.append(max(event["cpu"] for event in events if event["event"] == "state"))
    return [round((after - before) * 1e3, 2) for before, after in itertools.pairwise(marks)]


def run(program: Path, url: str, folder: Path, turns: int) -> list[dict[str, Any]]:
    forward = folder / "scale.py"
    forward.write_text(FORWARD)
    command = [program, "--file-path", forward, "--base-url", url, "--draft", "llm", "--model", "scripted"]
    command += ["--max-iters", turns, "--patience-parity", turns + 1, "--out", folder / "runs", "--quiet"]
    command += ["--no-lessons"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))}
    subprocess.run(
        [str(part) for part in command],
        env={**kept, "KA_SHARE": str(ROOT)},
        stdout=subprocess.DEVNULL,
        check=False,  # no candidate is verified
    )
    journal = next(folder.glob("runs/*/run.jsonl"))
    return [json.loads(line) for line in journal.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--turns", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as name:
        folder = Path(name)
        steps = [{"text": fenced(WRONG + f"\n# try {i}\n")} for i in range(args.turns)]
        (folder / "script.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        server = [sys.executable, str(ROOT / "tests/llm/server.py"), "--script", str(folder / "script.jsonl")]
        endpoint = subprocess.Popen(
            [*server, "--repeat", "--seconds", "600"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert endpoint.stdout is not None
            port = endpoint.stdout.readline().strip()
            events = run(args.program.resolve(), f"http://127.0.0.1:{port}/v1", folder, args.turns)
        finally:
            endpoint.terminate()
            endpoint.wait()
    turns = sum(event["event"] == "verdict" for event in events)
    gaps = gaps_ms(events)
    by_turn = processor_ms_by_turn(events)
    if not turns or not gaps:
        print("the run had no turn to measure", file=sys.stderr)
        return 1
    result = {
        "turns": turns,
        "gap_ms_median": round(statistics.median(gaps), 3),
        "gap_ms_max": round(max(gaps), 3),
        "gaps": len(gaps),
        "processor_ms_per_turn": round(statistics.mean(by_turn), 2),
        "processor_ms_by_turn": by_turn,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How long a turn of several candidates takes against one of a single candidate. Prints one JSON object.

    scripts/bench_candidates.py [--program build/kernel-agent] [--candidates 4] [--delay 20]

Runs one job against the scripted endpoint of tests/llm, whose answers take --delay seconds, with one question
and then with --candidates of them. The answers are different backwards, and each is checked. Asked one after
the other, they would take their delays together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "scripts")]
import bounded  # noqa: E402
from files import BACKWARD, FORWARD, fenced  # noqa: E402


def run(program: Path, url: str, folder: Path, candidates: int) -> dict[str, Any]:
    """Seconds of the whole run, and what became of it."""
    (folder / "scale.py").write_text(FORWARD)
    command = [program, "--file-path", folder / "scale.py", "--base-url", url, "--model", "scripted"]
    command += ["--draft", "llm", "--no-optimise", "--no-retrieval", "--candidates", candidates, "--json"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))}
    began = time.monotonic()
    done = subprocess.run(
        [*map(str, command), "--out", str(folder / "runs"), "--quiet"],
        env={**kept, "KA_SHARE": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = round(time.monotonic() - began, 2)
    return {"seconds": seconds, "attempts": json.loads(done.stdout)["attempts"]}


def measure(program: Path, candidates: int, delay: float) -> dict[str, Any]:
    steps = [{"text": fenced(BACKWARD + f"\nTRY = {i}\n"), "delay": delay} for i in range(candidates)]
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as name:
        script = Path(name) / "script.jsonl"
        script.write_text("".join(json.dumps(step) + "\n" for step in steps))
        server = [sys.executable, str(ROOT / "tests/llm/server.py"), "--script", str(script)]
        endpoint = subprocess.Popen([*server, "--seconds", "600"], stdout=subprocess.PIPE, text=True)
        try:
            assert endpoint.stdout is not None
            port = endpoint.stdout.readline().strip()
            return run(program, f"http://127.0.0.1:{port}/v1", Path(name), candidates)
        finally:
            endpoint.terminate()
            endpoint.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--delay", type=float, default=20)
    args = parser.parse_args()
    load = bounded.load()
    one = measure(args.program.resolve(), 1, args.delay)
    several = measure(args.program.resolve(), args.candidates, args.delay)
    if (one["attempts"], several["attempts"]) != (1, args.candidates):
        print("not every candidate was checked", file=sys.stderr)
        return 1
    result = {
        "machine": bounded.machine() | {"load_before": load, "load_after": bounded.load()},
        "candidates": args.candidates,
        "delay_s": args.delay,
        "one_s": one["seconds"],
        "several_s": several["seconds"],
        "ratio": round(several["seconds"] / one["seconds"], 2),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What a verdict costs beside the work that it judges: scripts/bench_verdict.py [--build build] [--out FILE]
[FORWARD...]

Every forward file is completed by the differentiator and gets the full verdict (no optimisation). Then one
forward and backward of the finished pair on each of the same shapes runs in the same jail, started cold, and
the ratio of the two is printed with the share of each part of the verdict. Wall clock: on a busy machine only
the ratios mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded

from bench import machine

ROOT = Path(__file__).resolve().parents[1]
FOREVER = 1e6  # seconds: a benchmark is watched by who runs it


def records(folder: Path) -> list[dict[str, Any]]:
    (journal,) = folder.glob("*/run.jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()]


def parts_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part. `start`: what children took beyond their operation (jail, interpreter, transfers)."""
    parts: dict[str, float] = {}
    checking = False
    for event in events:
        if event["event"] != "child":
            continue
        name, inner = event["op"], event.get("seconds") or 0.0
        checking = checking or name == "candidate"
        if name == "oracle":
            name = "oracle" if checking else "preflight"
        parts[name] = parts.get(name, 0.0) + inner
        parts["start"] = parts.get("start", 0.0) + event["ms"] / 1e3 - inner
    return parts


def one_pass(build: Path, pair: Path, stub: str, shapes: list[dict[str, Any]], folder: Path) -> float:
    """Seconds of one forward and backward on every shape, in a jail of its own."""
    scratch = folder / "once"
    scratch.mkdir(mode=0o700)
    cases = [
        {"id": at, "dims": shape["dims"], "seed": at, "upstream": {"kind": "normal", "seed": at}}
        for at, shape in enumerate(shapes)
    ]
    request = {"op": "candidate", "nonce": "0", "file": str(pair), "device": "cpu", "target": "sm_90"}
    request |= {"dtype": None, "entry": f"{stub}_autograd", "cases": cases, "plain": True}
    (scratch / "request.json").write_text(json.dumps(request))
    package = ROOT / "sandbox"
    command = [build / "ka-jail", "--scratch", scratch, "--ro", package, "--ro", pair]
    command += ["--env", f"PYTHONPATH={package}", "--", sys.executable, "-m", "kernel_agent.child", scratch]
    done = bounded.run(command, FOREVER)
    if done.code:
        raise SystemExit(f"{pair.name}: the plain pass failed: {done.err[-500:]}")
    return done.seconds


def measure(build: Path, forward: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ka-bench-") as temporary:
        folder = Path(temporary)
        command = [build / "kernel-agent", "--file-path", forward, "--backend", "none", "--no-optimise"]
        done = bounded.run([*command, "--json", "--out", folder / "runs"], FOREVER)
        wall = done.seconds
        result = json.loads(done.out)
        if result["verdict"] != "verified":
            return {"file": forward.name, "verdict": result["verdict"]}
        events = records(folder / "runs")
        (preflight,) = [event for event in events if event["event"] == "preflight"]
        once = one_pass(build, Path(result["pair"]), result["stub"], preflight["shapes"], folder)
    parts = parts_of(events)
    parts["comparison and the rest"] = max(0.0, wall - sum(parts.values()))
    return {
        "file": forward.name,
        "verdict": "verified",
        "attempts": result["attempts"],
        "shapes": len(preflight["shapes"]),
        "verdict_s": round(wall, 2),
        "one_pass_s": round(once, 2),
        "ratio": round(wall / once, 1),
        "share": {name: round(seconds / wall, 3) for name, seconds in parts.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted((ROOT / "examples").glob("*.py")))
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    about = machine() | {"threads": os.environ.get("OMP_NUM_THREADS")}
    results = []
    for path in options.files:
        results.append(measure(options.build.resolve(), path.resolve()))
        one = results[-1]
        share = ", ".join(f"{name} {100 * part:.0f} %" for name, part in one.get("share", {}).items())
        print(
            f"{one['file']:24} {one.get('verdict_s', 0):8.1f} s  {one.get('one_pass_s', 0):7.1f} s  "
            f"x{one.get('ratio', 0):<6} {share or one['verdict']}",
            flush=True,
        )
        if options.out:
            options.out.write_text(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Runs the verdict over many files and keeps the results: `check` for pairs, the whole job for forwards.

    scripts/check_all.py --program build/kernel-agent --out results.json [--device cuda] [--python PATH]
    [--jobs 4] [--seconds SECONDS] [--budget SECONDS] [--sweeps FILE] [--no-optimise] FILE...

--sweeps names a JSON object: file name -> list of dims to check instead of the file's own SWEEP. Files are
spread over all GPUs.

Prints a line a file as it ends and a summary; exits 1 if any file is not verified. Files that did not get
their turn within the budget are listed as such; a file that takes longer than --seconds is ended, and its
verdict is "late". --no-optimise: a forward's run ends with its first verified backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded


def options_of(args: argparse.Namespace) -> list[str]:
    """Those of every command."""
    options = ["--json", "--device", args.device, "--deadline", str(args.deadline), "--out", args.runs]
    options += bounded.share(args.jobs)
    options += ["--python", args.python] if args.python else []
    return options + (["--dtype", args.dtype] if args.dtype else [])


def run_one(path: Path, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """The result object of one file, with the command's exit code and the end of its stderr."""
    if time.monotonic() > until:
        return {"file": str(path), "verdict": "not reached"}
    is_pair = "# ---- backward ----" in path.read_text()
    command = [args.program]
    command += ["check", str(path)] if is_pair else ["--file-path", str(path), "--backend", "none"]
    command += ["--no-optimise"] if args.no_optimise and not is_pair else []
    command += options_of(args)
    sweep = args.sweeps.get(path.name)
    command += ["--sweep", json.dumps(sweep)] if sweep else []
    with args.cards.one() as card:
        done = bounded.run([*command, *card], args.seconds)
    return entry_of(path, done)


def entry_of(path: Path, done: bounded.Ended) -> dict[str, Any]:
    """What is kept of the result that a command printed, or how it ended without one."""
    try:
        result: dict[str, Any] = json.loads(done.out)
    except json.JSONDecodeError:
        result = {"verdict": "error" if done.code is not None else "late"}
    kept = (
        "verdict", "stub", "shapes", "gradients", "attempts", "error", "failures", "atomics", "tape_bytes",
        "draft", "loop_blocked_ms", "loop_blocked_work_ms",
    )  # fmt: skip
    entry = {name: result[name] for name in kept if name in result}
    entry |= {"file": str(path), "exit_code": done.code, "seconds": round(done.seconds, 1)}
    if done.code != 0:
        entry["stderr"] = done.err[-3000:]
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--program", default="build/kernel-agent")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default="generated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--python", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--deadline", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=1e6, help="longest time for one file")
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--no-optimise", action="store_true")
    parser.add_argument("--sweeps", type=lambda name: json.loads(Path(name).read_text()), default={})
    args = parser.parse_args()
    args.cards = bounded.Cards(args.device)
    until = time.monotonic() + args.budget
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for entry in pool.map(lambda path: run_one(path, args, until), args.files):
            results.append(entry)
            why = str(entry.get("failures") or (entry.get("error") or {}).get("message") or "")
            why = why.replace("\n", " ")[:160]
            seconds = f"{entry.get('seconds', 0):7.1f} s"
            print(f"{entry['verdict']:13} {seconds}  {entry['file']}  {why}", flush=True)
            made = {"device": args.device, "dtype": args.dtype, "results": results}
            bounded.write_json(args.out, made)
    verified = sum(entry["verdict"] == "verified" for entry in results)
    print(f"{verified} of {len(results)} verified on {args.device}")
    return 0 if verified == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())

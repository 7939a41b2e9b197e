#!/usr/bin/env python3
"""Runs the verdict over every pair of dataset/, on the CPU in float32, and keeps what became of each.

    scripts/verify_dataset.py [--only REGEX] [--resume] [--jobs N] [--program build/kernel-agent]
                              [--out bench/results/dataset-cpu.json] [--dataset DIR] [--seconds SECONDS]

--only takes the pairs whose path matches; what the file of results has of others stays in it. --resume does
not check again what was checked before with the same text, program and versions of torch and Triton, and
has it in the table and the count. Results are written as each pair ends, so that an interrupted run goes on
with --resume. Exits 1 if a pair is not verified, 2 if there is none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded
import check_all

ROOT = Path(__file__).resolve().parents[1]
REASON_MAX = 300

Entry = dict[str, Any]


def digest(files: Iterable[Path], *words: str) -> str:
    made = hashlib.sha256("\0".join(words).encode())
    for path in files:
        made.update(hashlib.sha256(path.read_bytes()).digest())
    return made.hexdigest()


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def program_digest(program: Path) -> str:
    """Of all that a verdict depends on beside the pair: the program, its jail, its Python, torch, Triton."""
    parts = [program, program.with_name("ka-jail"), program.with_name("libka_jail.so")]
    python = sorted((ROOT / "sandbox" / "kernel_agent").rglob("*.py"))
    return digest((p for p in parts + python if p.exists()), version_of("torch"), version_of("triton"))


def small(entry: Entry) -> Entry:
    """What is kept of check_all's entry."""
    shapes = entry.get("shapes", {})
    made: Entry = {name: entry[name] for name in ("verdict", "exit_code", "seconds") if name in entry}
    made["shapes"] = f"{shapes.get('passed', 0)}/{shapes.get('required', 0)}"
    made["hidden"] = f"{shapes.get('hidden_passed', 0)}/{shapes.get('hidden', 0)}"
    made["error"] = max((g["error"] or 0 for g in entry.get("gradients", [])), default=None)
    if entry["verdict"] != "verified":
        why = entry.get("failures") or (entry.get("error") or {}).get("message") or entry.get("stderr") or ""
        made["reason"] = (why if isinstance(why, str) else json.dumps(why))[:REASON_MAX]
    return made


class Run:
    """The pairs of one call, what is known of them, and the file of results."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.program = program_digest(args.program)
        self.pairs = {self.name(p): p for p in sorted(args.dataset.glob("*/*.py"))}
        self.known: dict[str, Entry] = {}
        if args.out.exists():
            rows = json.loads(args.out.read_text())["results"]
            self.known = {row["file"]: row for row in rows if row["file"] in self.pairs}
        self.chosen = [n for n in self.pairs if args.only.search(n)]
        self.ended = {n for n in self.chosen if args.resume and self.is_current(n)}

    def name(self, path: Path) -> str:
        return f"{self.args.dataset.name}/{path.relative_to(self.args.dataset)}"

    def is_current(self, name: str) -> bool:
        row = self.known.get(name, {})
        same = row.get("sha256") == digest([self.pairs[name]]) and row.get("program") == self.program
        return same and row["verdict"] not in ("late", "error")  # those are no verdicts

    def check(self, name: str) -> Entry:
        marks = {"file": name, "sha256": digest([self.pairs[name]]), "program": self.program}
        return marks | small(check_all.run_one(self.pairs[name], self.args, float("inf")))

    def time_left(self) -> float:
        """As long as each took the last time, or the mean of what is known."""
        took = [row["seconds"] for row in self.known.values()]
        mean = sum(took) / len(took) if took else 0.0
        left = [self.known.get(n, {}).get("seconds", mean) for n in self.chosen if n not in self.ended]
        return sum(left) / self.args.jobs

    def keep(self, entry: Entry) -> None:
        self.known[entry["file"]] = entry
        self.ended.add(entry["file"])
        rows = [self.known[n] for n in self.pairs if n in self.known]
        made = {"device": "cpu", "dtype": self.args.dtype, "torch": version_of("torch")}
        made |= {"triton": version_of("triton"), "machine": bounded.machine(), "results": rows}
        bounded.write_json(self.args.out, made)

    def say(self, entry: Entry) -> None:
        left = self.time_left()
        amount = f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
        done = f"{len(self.ended)} of {len(self.chosen)}"
        print(f"{done}: {entry['verdict']} {entry['file']}, {entry['seconds']:.0f} s; {amount}", flush=True)

    def run(self) -> None:
        todo = [n for n in self.chosen if n not in self.ended]
        if self.ended:
            print(f"{len(self.ended)} of {len(self.chosen)} are unchanged since they were checked")
        with ThreadPoolExecutor(self.args.jobs) as pool:
            try:
                for future in as_completed([pool.submit(self.check, name) for name in todo]):
                    self.keep(future.result())
                    self.say(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                bounded.end_all()
                raise

    def table(self) -> None:
        width = max(len(name) for name in self.chosen)
        print(f"\n{'pair':{width}}  verdict       shapes  hidden    error  seconds")
        for name in self.chosen:
            row = self.known[name]
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            print(
                f"{name:{width}}  {row['verdict']:12}  {row['shapes']:>6}  {row['hidden']:>6}  {error:>7}"
                f"  {row['seconds']:7.1f}"
            )
            if row.get("reason"):
                print("    " + " ".join(row["reason"].split()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "dataset-cpu.json")
    parser.add_argument("--dataset", type=Path, default=ROOT / "dataset")
    parser.add_argument("--runs", default="generated/dataset", help="where the program writes its runs")
    parser.add_argument("--seconds", type=float, default=3600, help="longest time for one pair")
    fixed = {"device": "cpu", "dtype": "float32", "python": sys.executable, "deadline": 300, "sweeps": {}}
    parser.set_defaults(**fixed)
    args = parser.parse_args()
    args.dataset = args.dataset.resolve()
    return args


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    run = Run(parse())
    if not run.chosen:
        print(f"no pair of {run.args.dataset} matches {run.args.only.pattern!r}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):  # also where a shell has it ignored, in the background
        signal.signal(number, interrupt)
    started = time.monotonic()
    try:
        run.run()
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(run.ended)} of {len(run.chosen)}; go on with --resume", flush=True)
        return 130
    run.table()
    passed = sum(run.known[name]["verdict"] == "verified" for name in run.chosen)
    print(f"\n{time.monotonic() - started:.0f} s, results in {run.args.out}")
    print(f"{passed} passed, {len(run.chosen) - passed} failed")
    return 0 if passed == len(run.chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

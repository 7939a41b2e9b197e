#!/usr/bin/env python3
"""Runs the verdict over every pair of dataset/ and keeps what became of each.

    scripts/verify_dataset.py [--device cpu|cuda] [--dtype float32|own|half] [--only REGEX] [--resume]
                              [--jobs N] [--program build/kernel-agent] [--python PATH]
                              [--out bench/results/dataset-cpu.json] [--dataset DIR]
                              [--seconds SECONDS] [--budget SECONDS]

A pair is checked in float32, or in each dtype that its docstring names (own; half: in those of 16 bits, and
in float32 where it names none). --only takes the pairs whose path matches; what the file of results has of
others stays in it. --resume does not check again what was checked before with the same text, program and
versions of torch and Triton, and has it in the table and the count; with --resume same-text the program may
be another. Checks are spread over all GPUs, and several are one program's, which imports torch and Triton
once. Results are written as each check ends, so that an interrupted run goes on with --resume. No check
begins after --budget. Exits 1 if a check is not verified or had no turn, 2 if there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import signal
import sys
import threading
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
GROUP_MOST = 8
NAMES = "gpu=name,driver_version"  # what nvidia-smi is asked for
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Entry = dict[str, Any]
Check = tuple[str, str]  # a pair's name, and a dtype


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


def dtypes_of(path: Path, wanted: str) -> list[str]:
    """The dtypes to check a pair in."""
    named = re.search(r"^dtypes: (.+)$", path.read_text(), re.M)
    own = named.group(1).split(", ") if named else ["fp32"]
    halves = [dtype for dtype in own if dtype != "fp32"]
    return [DTYPES[dtype] for dtype in {"own": own, "half": halves or ["fp32"]}.get(wanted, ["fp32"])]


def program_digest(program: Path) -> str:
    """Of all that a verdict depends on beside the pair: the program, its jail, its Python, torch, Triton."""
    parts = [program, program.with_name("ka-jail"), program.with_name("libka_jail.so")]
    python = sorted((ROOT / "sandbox" / "kernel_agent").rglob("*.py"))
    return digest((p for p in parts + python if p.exists()), version_of("torch"), version_of("triton"))


def reason(text: str) -> str:
    """What is kept of a message, with paths from the root on."""
    return text.replace(f"{ROOT}/", "")[:REASON_MAX]


def small(entry: Entry) -> Entry:
    """What is kept of check_all's entry."""
    shapes = entry.get("shapes", {})
    made: Entry = {name: entry[name] for name in ("verdict", "exit_code", "seconds") if name in entry}
    made["shapes"] = f"{shapes.get('passed', 0)}/{shapes.get('required', 0)}"
    made["hidden"] = f"{shapes.get('hidden_passed', 0)}/{shapes.get('hidden', 0)}"
    made["error"] = max((g["error"] or 0 for g in entry.get("gradients", [])), default=None)
    if entry["verdict"] != "verified":
        why = entry.get("failures") or (entry.get("error") or {}).get("message")
        why = why or shapes.get("skipped") or entry.get("stderr", "")[-REASON_MAX:]
        made["reason"] = reason(why if isinstance(why, str) else json.dumps(why))
    return made


class Run:
    """The checks of one call, what is known of them, and the file of results."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.until = time.monotonic() + args.budget
        self.program = program_digest(args.program)
        self.pairs = {self.name(p): p for p in sorted(args.dataset.glob("*/*.py"))}
        self.known: dict[Check, Entry] = {}
        self.results = threading.Lock()
        if args.out.exists():
            rows = json.loads(args.out.read_text())["results"]
            self.known = {(row["file"], row["dtype"]): row for row in rows if row["file"] in self.pairs}
        self.chosen = [
            (name, dtype)
            for name, path in self.pairs.items()
            if args.only.search(name)
            for dtype in dtypes_of(path, args.dtype)
        ]
        self.ended = {one for one in self.chosen if args.resume and self.is_current(one)}

    def name(self, path: Path) -> str:
        return f"{self.args.dataset.name}/{path.relative_to(self.args.dataset)}"

    def is_current(self, one: Check) -> bool:
        row = self.known.get(one, {})
        same = row.get("sha256") == digest([self.pairs[one[0]]])
        same = same and (self.args.resume == "same-text" or row.get("program") == self.program)
        return same and row["verdict"] not in ("late", "error")  # those are no verdicts

    def check(self, group: list[Check]) -> None:
        """By one program after another, until each has a result: the next goes on behind one that ended in
        the middle of a check."""
        while group and time.monotonic() <= self.until:
            ended = self.check_some(group)
            group = group[ended:]

    def check_some(self, group: list[Check]) -> int:
        """How many have a result now; at least one."""
        (dtype,) = {dtype for _, dtype in group}
        args = argparse.Namespace(**vars(self.args) | {"dtype": dtype})
        paths = [self.pairs[name] for name, _ in group]
        count, text, took = 0, "", 0.0

        def told(line: str, seconds: float) -> bool:
            """A result is a line, the only one several."""
            nonlocal count, text, took
            text, took = text + line, took + seconds
            if bounded.closed():
                return False
            with contextlib.suppress(json.JSONDecodeError):
                result = json.loads(text)
                if Path(result["file"]) != paths[count]:
                    raise ValueError(f"a result of {result['file']} where {paths[count]} was checked")
                self.keep(group[count], bounded.Ended(result["exit_code"], text, "", took))
                count, text, took = count + 1, "", 0.0
            return time.monotonic() <= self.until

        with args.cards.one() as card:
            command = [args.program, "check", *paths, *check_all.options_of(args), *card]
            done = bounded.follow(command, args.seconds, told)
        if bounded.closed():
            return len(group)
        if count < len(group) and time.monotonic() <= self.until:
            self.keep(group[count], done)
            count += 1
        return count

    def groups(self, todo: list[Check]) -> list[list[Check]]:
        """A group is one program's: it imports torch and Triton once. So many that nobody has to wait for who
        has the last one."""
        size = max(1, min(GROUP_MOST, len(todo) // (4 * self.args.jobs)))
        by_dtype = sorted(todo, key=lambda one: one[1])
        made: list[list[Check]] = []
        for one in by_dtype:
            if not made or len(made[-1]) == size or made[-1][0][1] != one[1]:
                made.append([])
            made[-1].append(one)
        return made

    def time_left(self) -> float:
        """As long as each took the last time, or the mean of what is known."""
        took = [row["seconds"] for row in self.known.values()]
        mean = sum(took) / len(took) if took else 0.0
        left = [self.known.get(one, {}).get("seconds", mean) for one in self.chosen if one not in self.ended]
        return sum(left) / self.args.jobs

    def keep(self, one: Check, done: bounded.Ended) -> None:
        name, dtype = one
        entry = {"file": name, "dtype": dtype, "sha256": digest([self.pairs[name]]), "program": self.program}
        entry |= {"gpu": self.args.gpus[0].split(",")[0]} if self.args.gpus else {}
        entry |= small(check_all.entry_of(self.pairs[name], done))
        made = {"device": self.args.device, "torch": version_of("torch"), "triton": version_of("triton")}
        made |= {"machine": bounded.machine()} | ({"gpu": self.args.gpus} if self.args.gpus else {})
        with self.results:
            self.known[one] = entry
            self.ended.add(one)
            rows = [self.known[key] for key in sorted(self.known)]
            bounded.write_json(self.args.out, made | {"results": rows})
            self.say(entry)

    def say(self, entry: Entry) -> None:
        left = self.time_left()
        amount = f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
        done = f"{len(self.ended)} of {len(self.chosen)}"
        what = f"{entry['file']}, {entry['dtype']}"
        print(f"{done}: {entry['verdict']} {what}, {entry['seconds']:.0f} s; {amount}", flush=True)

    def run(self) -> None:
        todo = [one for one in self.chosen if one not in self.ended]
        if self.ended:
            print(f"{len(self.ended)} of {len(self.chosen)} are unchanged since they were checked")
        with ThreadPoolExecutor(self.args.jobs) as pool:
            try:
                for future in as_completed([pool.submit(self.check, group) for group in self.groups(todo)]):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                bounded.end_all()
                raise

    def table(self) -> None:
        width = max(len(name) for name, _ in self.chosen)
        print(f"\n{'pair':{width}}  dtype     verdict       shapes  hidden    error  seconds")
        for name, dtype in self.chosen:
            if (name, dtype) not in self.ended:
                print(f"{name:{width}}  {dtype:8}  had no turn")
                continue
            row = self.known[name, dtype]
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            print(
                f"{name:{width}}  {dtype:8}  {row['verdict']:12}  {row['shapes']:>6}  {row['hidden']:>6}"
                f"  {error:>7}  {row['seconds']:7.1f}"
            )
            if row.get("reason"):
                print("    " + " ".join(row["reason"].split()))

    def passed(self) -> int:
        return sum(self.known[one]["verdict"] == "verified" for one in self.chosen if one in self.ended)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "own", "half"], default="float32")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--resume", nargs="?", choices=["same", "same-text"], const="same")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "dataset-cpu.json")
    parser.add_argument("--dataset", type=Path, default=ROOT / "dataset")
    parser.add_argument("--runs", default="generated/dataset", help="where the program writes its runs")
    parser.add_argument("--seconds", type=float, default=3600, help="longest time for one pair")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no check begins")
    parser.add_argument("--python", default=sys.executable)
    parser.set_defaults(deadline=300, sweeps={})
    args = parser.parse_args()
    args.cards = bounded.Cards(args.device)
    args.gpus = (bounded.smi(NAMES) or []) if args.device == "cuda" else []
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
    passed = run.passed()
    print(f"\n{time.monotonic() - started:.0f} s, results in {run.args.out}")
    print(f"{passed} passed, {len(run.chosen) - passed} failed")
    return 0 if passed == len(run.chosen) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The property test of the differentiator: random kernels and random host functions, each differentiated,
run, and judged as the verdict judges.

    .venv/bin/python tests/property/run.py [--kind kernels|wrappers|sequences|all] [--kernels 2000]
        [--wrappers 500] [--sequences 100] [--seed 0] [--jobs 1] [--out FILE] [--keep-going]

Runs so many programs of a kind, and counts them by outcome; what is refused or raised is counted by
reason. Programs whose gradient is decided by rounding are `vague`. A wrong gradient or a crash is shrunk and
printed, and ends the run with exit code 1. With `--kind all`, `--out F.json` writes F-kernels.json,
F-wrappers.json and F-sequences.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / folder) for folder in ("sandbox", "tests/python", "tests/property", "scripts")]

import bounded
import generate
import judge
import numpy
import sequences
import torch
import triton
import wrappers
from shrink import shrink

SCHEDULES = (None, None, "owner", "atomic")  # by seed; None is the differentiator's own choice


# What a tuner asks for wherever it is proven, of two programs in five.
TUNED = {"splits": 3, "shares": 5, "outputs": 1, "saved": 1}


def schedule_of(seed: int) -> str | None:
    return SCHEDULES[seed % len(SCHEDULES)]


def config_of(seed: int) -> dict[str, int] | None:
    return TUNED if seed % 5 < 2 else None


MAKERS: dict[str, Callable[[int], generate.Program]] = {
    "kernels": generate.make,
    "wrappers": wrappers.make,
    "sequences": sequences.make,
}
STATES = ("right", "wrong", "crashed", "refused", "raised", "vague", "unusable")


def judged(program: generate.Program, source: str, kind: str) -> judge.Outcome:
    """Every third wrapper is traced at its first size only: what others launch has to raise."""
    others = kind != "kernels" and program.seed % 3 != 0
    asked = schedule_of(program.seed), others, config_of(program.seed)
    return judge.judge(source, program.sweep, program.seed, *asked)


def check(kind: str, seed: int) -> tuple[generate.Program, judge.Outcome]:
    """One program of the test."""
    program = MAKERS[kind](seed)
    return program, judged(program, program.source, kind)


def shrunk(program: generate.Program, outcome: judge.Outcome, kind: str) -> str:
    """A small program that fails in the same way."""

    def fails(source: str) -> bool:
        found = judged(program, source, kind)
        return (found.state, found.kind) == (outcome.state, outcome.kind)

    return shrink(program.source, fails)


def explain(program: generate.Program, outcome: judge.Outcome, kind: str) -> str:
    """The failing program, made small, with its backward and what is wrong."""
    small = shrunk(program, outcome, kind)
    found = judged(program, small, kind)
    bar = "-" * 100
    return (
        f"{bar}\n{kind} {program.seed} (schedule {schedule_of(program.seed) or 'own choice'}, "
        f"config {config_of(program.seed)}): "
        f"{outcome.state}: {outcome.reason}\n"
        f"made small: {found.reason}\n{bar}\n{small}\n{bar}\n{found.backward}"
    )


def reason_of(outcome: judge.Outcome) -> str:
    """Without places, names and numbers, so that equal reasons are counted together."""
    text = re.sub(r"`[^`]*`", "`...`", outcome.reason.strip().splitlines()[-1])
    text = re.sub(r"case \d+: |line \d+ |\w+_(kernel\d+|ptr) ?", "", text)
    return re.sub(r" \(line \d+\)|\d+(\.\d+)?(e[-+]?\d+)?", "", text)[:160].strip()


class Tally:
    """Counts by state, and of the right ones by feature and by class of the loops."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.features: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.schedules: Counter[str] = Counter()

    def add(self, program: generate.Program, outcome: judge.Outcome) -> None:
        self.states[outcome.state] += 1
        self.tried.update(program.features)
        if outcome.state != "right":
            self.reasons.setdefault(outcome.state, Counter())[reason_of(outcome)] += 1
            return
        assert outcome.report is not None
        self.features.update(program.features)
        self.classes.update({line["class"] for line in outcome.report["lines"]})
        self.schedules[outcome.report["schedule"]] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            **{state: self.states[state] for state in STATES},
            "reasons": {state: dict(counts.most_common()) for state, counts in sorted(self.reasons.items())},
            "right_by_feature": {
                f: f"{self.features[f]} of {count}" for f, count in self.tried.most_common()
            },
            "right_by_decision": dict(self.classes.most_common()),
            "right_by_schedule": dict(self.schedules.most_common()),
        }


def outcomes(kind: str, seeds: range, jobs: int) -> Iterator[tuple[generate.Program, judge.Outcome]]:
    """The programs of these seeds, judged by so many processes."""
    if jobs < 2:
        yield from (check(kind, seed) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, initializer=prepare) as pool:
        yield from pool.map(check, [kind] * len(seeds), seeds, chunksize=4)


def prepare() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    torch.set_num_threads(1)


def summary(kind: str, count: int, tally: Tally, args: argparse.Namespace, started: float) -> dict[str, Any]:
    """The result so far: fewer `programs` than `asked` are of a run that was cut off."""
    return {
        "kind": kind,
        "seed": args.seed,
        "asked": count,
        "programs": sum(tally.states.values()),
        **tally.as_dict(),
        "seconds": round(time.monotonic() - started),
        "jobs": args.jobs,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__},
    }


def run(kind: str, count: int, args: argparse.Namespace) -> bool:
    """All programs of one kind; whether none was wrong."""
    started, tally = time.monotonic(), Tally()
    out = args.out
    if out is not None and args.kind == "all":
        out = out.with_name(f"{out.stem}-{kind}.json")
    for program, outcome in outcomes(kind, range(args.seed, args.seed + count), args.jobs):
        tally.add(program, outcome)
        tried = program.seed - args.seed + 1
        if outcome.bad and not args.keep_going:
            print(explain(program, outcome, kind), flush=True)
            break
        if outcome.bad:
            print(f"{kind} {program.seed}: {outcome.state}: {outcome.reason.strip()}", flush=True)
        if tried % 50 == 0:
            print(f"{tried} {kind}: {dict(tally.states)}", flush=True)
            if out:
                bounded.write_json(out, summary(kind, count, tally, args, started))
    result = summary(kind, count, tally, args, started)
    if out:
        bounded.write_json(out, result)
    short = {k: v for k, v in result.items() if not isinstance(v, dict) or k == "reasons"}
    print(json.dumps(short, indent=1), flush=True)
    return not (tally.states["wrong"] or tally.states["crashed"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=[*MAKERS, "all"], default="all")
    parser.add_argument("--kernels", type=int, default=2000)
    parser.add_argument("--wrappers", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep-going", action="store_true", help="do not shrink, go on after a failure")
    args = parser.parse_args()
    prepare()
    counts = {kind: getattr(args, kind) for kind in MAKERS}
    kinds = list(MAKERS) if args.kind == "all" else [args.kind]
    fine = [run(kind, counts[kind], args) for kind in kinds]  # each, whatever came of the others
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())

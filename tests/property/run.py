#!/usr/bin/env python3
"""The property test of the differentiator: random programs, each differentiated, run, and judged as the
verdict judges.

    .venv/bin/python tests/property/run.py [--programs 1000] [--seed 0] [--out FILE] [--keep-going]

Goes on until so many programs were right; refused ones are counted by reason and do not count among them, nor
do programs whose gradient is decided by rounding. A wrong gradient or a crash is shrunk and printed, and ends
the run with exit code 1.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT / "sandbox"), str(ROOT / "tests/python"), str(ROOT / "tests/property")]

import generate
import judge
import numpy
import torch
import triton
from shrink import shrink

SCHEDULES = (None, None, "owner", "atomic")  # by seed; None is the differentiator's own choice


def schedule_of(seed: int) -> str | None:
    return SCHEDULES[seed % len(SCHEDULES)]


def check(seed: int) -> tuple[generate.Program, judge.Outcome]:
    """One program of the test."""
    program = generate.make(seed)
    return program, judge.judge(program.source, program.sweep, seed, schedule_of(seed))


def shrunk(program: generate.Program, outcome: judge.Outcome) -> str:
    """A small program that fails in the same way."""

    def fails(source: str) -> bool:
        found = judge.judge(source, program.sweep, program.seed, schedule_of(program.seed))
        return (found.state, found.kind) == (outcome.state, outcome.kind)

    return shrink(program.source, fails)


def explain(program: generate.Program, outcome: judge.Outcome) -> str:
    """The failing program, made small, with its backward and what is wrong."""
    small = shrunk(program, outcome)
    found = judge.judge(small, program.sweep, program.seed, schedule_of(program.seed))
    bar = "-" * 100
    return (
        f"{bar}\nprogram {program.seed} (schedule {schedule_of(program.seed) or 'own choice'}): "
        f"{outcome.state}: {outcome.reason}\n"
        f"made small: {found.reason}\n{bar}\n{small}\n{bar}\n{found.backward}"
    )


def reason_of(outcome: judge.Outcome) -> str:
    """Without places, names and numbers, so that equal reasons are counted together."""
    text = re.sub(r"`[^`]*`", "`...`", outcome.reason.strip().splitlines()[-1])
    return re.sub(r" \(line \d+\)|\d+(\.\d+)?(e[-+]?\d+)?", "", text)[:160].strip()


class Tally:
    """Counts by state, and of the right ones by feature and by class of the loops."""

    def __init__(self) -> None:
        self.states: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.features: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.schedules: Counter[str] = Counter()

    def add(self, program: generate.Program, outcome: judge.Outcome) -> None:
        self.states[outcome.state] += 1
        if outcome.state != "right":
            self.reasons.setdefault(outcome.state, Counter())[reason_of(outcome)] += 1
            return
        assert outcome.report is not None
        self.features.update(program.features)
        self.classes.update({line["class"] for line in outcome.report["lines"]})
        self.schedules[outcome.report["schedule"]] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            **{
                state: self.states[state]
                for state in ("right", "wrong", "crashed", "refused", "vague", "unusable")
            },
            "reasons": {state: dict(counts.most_common()) for state, counts in sorted(self.reasons.items())},
            "right_by_feature": dict(self.features.most_common()),
            "right_by_decision": dict(self.classes.most_common()),
            "right_by_schedule": dict(self.schedules.most_common()),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep-going", action="store_true", help="do not shrink, go on after a failure")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    torch.set_num_threads(1)
    started, tally, seed = time.monotonic(), Tally(), args.seed
    while tally.states["right"] < args.programs:
        program, outcome = check(seed)
        tally.add(program, outcome)
        seed += 1
        if outcome.bad and not args.keep_going:
            print(explain(program, outcome), flush=True)
            break
        if outcome.bad:
            print(f"{program.seed}: {outcome.state}: {outcome.reason.strip()}", flush=True)
        if (seed - args.seed) % 50 == 0:
            print(f"{seed - args.seed} programs: {dict(tally.states)}", flush=True)
            save(args, seed, tally, started)
    result = save(args, seed, tally, started)
    print(
        json.dumps({k: v for k, v in result.items() if not isinstance(v, dict) or k == "reasons"}, indent=1)
    )
    return 1 if tally.states["wrong"] or tally.states["crashed"] else 0


def save(args: argparse.Namespace, seed: int, tally: Tally, started: float) -> dict[str, Any]:
    """What is known so far, also as a file where one is asked for."""
    result = {
        "seed": args.seed,
        "programs": seed - args.seed,
        **tally.as_dict(),
        "seconds": round(time.monotonic() - started),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    sys.exit(main())

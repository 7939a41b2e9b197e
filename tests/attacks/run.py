#!/usr/bin/env python3
"""Every attack must be rejected, with its reason; every honest control must be verified.

    tests/attacks/run.py [--build DIR] [--jobs N] [--only TEXT] [--keep DIR] [--any-reason]

Prints a line for each and `N attacks, 0 accepted; M controls, 0 rejected` at the end. Exit code 1 if anything
came out otherwise, if an attack was rejected for another reason, or if the program failed on one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import suite


@dataclass
class Job:
    title: str
    path: Path
    reason: str | None  # None: a control


@dataclass
class Outcome:
    job: Job
    verdict: str
    facts: str
    seconds: float
    problem: str | None


_running: list[subprocess.Popen[str]] = []


def stop(number: int, _: object) -> None:
    """A signal ends the programs that were started, too."""
    for child in _running:
        child.terminate()
    sys.exit(128 + number)


def check(program: Path, part: list[Job], any_reason: bool) -> Iterator[Outcome]:
    """The verdicts of one process, which keeps its interpreters warm, as they come."""
    command = [str(program), "check", *(str(job.path) for job in part), "--json", "--quiet"]
    with (
        tempfile.TemporaryFile("w+") as noise,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=noise, text=True, env=environment()
        ) as child,
    ):
        assert child.stdout is not None
        _running.append(child)
        for job in part:
            started = time.monotonic()
            # a line for each of several files, one indented document for one
            line = child.stdout.readline() if len(part) > 1 else child.stdout.read()
            if not line:
                child.wait()
                noise.seek(0)
                yield Outcome(
                    job, "none", noise.read()[-2000:], 0.0, f"the program ended with code {child.returncode}"
                )
                return
            result = json.loads(line)
            verdict = result.get("verdict", "none")
            facts = result.get("failures") or result.get("error", {}).get("message", "")
            wrong = problem(job, verdict, facts, any_reason)
            yield Outcome(job, verdict, facts, time.monotonic() - started, wrong)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def problem(job: Job, verdict: str, facts: str, any_reason: bool) -> str | None:
    if verdict not in ("verified", "not_verified"):
        return f"the program could not judge it: {verdict}"
    if job.reason is None:
        return None if verdict == "verified" else "a right backward was rejected"
    if verdict == "verified":
        return "ACCEPTED"
    return (
        None if any_reason or re.search(job.reason, facts) else f"rejected, but not because of /{job.reason}/"
    )


def jobs(folder: Path, only: str) -> list[Job]:
    made = []
    for attack in suite.attacks():
        made.append((f"row {attack.row:2} {attack.name}", attack.control, attack.backward(), attack.reason))
    for name in suite.controls():
        made.append((f"control {name}", name, suite.control(name), None))
    found = []
    for at, (title, control, backward, reason) in enumerate(made):
        if only and not re.search(only, title):
            continue
        path = folder / f"pair_{at}.py"
        path.write_text(suite.pair(control, backward))
        found.append((suite.forward_of(control), Job(title, path, reason)))
    # The program looks at a forward once for pairs that follow each other.
    return [job for _, job in sorted(found, key=lambda item: item[0])]


def show(outcome: Outcome) -> None:
    mark = "FAIL" if outcome.problem else "ok"
    reason = outcome.facts.strip().splitlines()
    first = next((line for line in reason if not line.startswith("On ")), "")
    print(
        f"{mark:4} {outcome.seconds:5.1f}s {outcome.job.title}: "
        f"{outcome.problem or first[:110] or outcome.verdict}"
    )
    if outcome.problem:
        print("    " + outcome.facts.strip().replace("\n", "\n    ")[:1500])
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", default="build", help="folder with kernel-agent")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression for the titles")
    parser.add_argument("--keep", help="folder in which the pairs stay")
    parser.add_argument(
        "--any-reason",
        action="store_true",
        help="a rejection for another reason is as good: on a GPU the interpreter's reasons are not seen",
    )
    options = parser.parse_args()
    program = Path(options.build).resolve() / "kernel-agent"
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        todo = jobs(folder, options.only)
        outcomes: list[Outcome] = []

        def work(part: list[Job]) -> None:
            for outcome in check(program, part, options.any_reason):
                outcomes.append(outcome)
                show(outcome)

        size = -(-len(todo) // options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(work, [todo[at : at + size] for at in range(0, len(todo), size or 1)]))
    attacks = [o for o in outcomes if o.job.reason is not None]
    controls = [o for o in outcomes if o.job.reason is None]
    accepted = sum(o.verdict == "verified" for o in attacks)
    rejected = sum(o.verdict != "verified" for o in controls)
    failed = sum(o.problem is not None for o in outcomes)
    print(
        f"{len(attacks)} attacks, {accepted} accepted; {len(controls)} controls, {rejected} rejected"
        + (f"; {failed} not as expected" if failed else "")
    )
    return 1 if failed or len(outcomes) != len(todo) or not todo else 0


if __name__ == "__main__":
    sys.exit(main())

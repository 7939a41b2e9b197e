#!/usr/bin/env python3
"""The mutation score: how many wrong backwards, made from right ones, the verdict rejects.

    tests/attacks/mutate.py [PAIR...] [--kinds TEXT] [--per-file N] [--sample N] [--seed S] [--build DIR]
                            [--jobs N] [--results FILE] [--json FILE]

Without pairs: the examples, completed by `kernel-agent --backend none` (kept in generated/mutants), and one
pair of every family of dataset/. Of each file N mutants are tried, the kinds taking turns; --sample takes N
of all of those. Each is judged by `kernel-agent check --fail-fast` in float32, where a narrowed value shows,
on the shapes of mutate_sweeps.toml or the file's own. The original goes first: what is not verified itself is
not mutated.

--results names a file of JSON lines: what it holds already is not judged again, so that an interrupted run
goes on. Mutants that equivalent.toml explains are not run: they count neither way, but for holes of the
verdict, which count as survivors. Prints every survivor with its diff, and `killed/total` at the end; exit
code 1 below a score of 0.99, or if an original was rejected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import mutants
import run

HERE = Path(__file__).parent
ROOT = HERE.resolve().parents[1]
LEAST_SCORE = 0.99
CHECK = ["--json", "--quiet", "--fail-fast", "--dtype", "float32", "--backend", "none", "--deadline", "120"]


@dataclass
class Pair:
    name: str
    source: str
    made: int = 0
    tried: list[mutants.Mutant] = field(default_factory=list)
    explained: list[mutants.Mutant] = field(default_factory=list)


@dataclass
class Results:
    """Verdicts by what was judged, each also a line of a file."""

    path: Path | None
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path and self.path.exists():
            lines = (json.loads(line) for line in self.path.read_text().splitlines())
            self.known = {line["of"]: line for line in lines}

    def add(self, source: str, entry: dict[str, Any]) -> None:
        with self.lock:
            self.known[digest(source)] = entry
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps({"of": digest(source), **entry}) + "\n")

    def of(self, source: str) -> dict[str, Any]:
        return self.known.get(digest(source), {"verdict": "none", "facts": ""})


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text())


def explanations() -> dict[tuple[str, str, str, int, str], dict[str, Any]]:
    entries = table("equivalent.toml").get("mutant", [])
    return {(e["pair"], e["kind"], e["at"], e.get("nth", 1), e["new"]): e for e in entries}


# ---- right pairs


def on_small_shapes(name: str, source: str) -> str:
    """The file with the shapes of mutate_sweeps.toml, if it is there, as its SWEEP_CPU."""
    sweep = table("mutate_sweeps.toml").get(name)
    if not sweep:
        return source
    at = source.find(mutants.MARKER)
    at = len(source) if at < 0 else at
    return f"{source[:at]}\n\nSWEEP_CPU = {sweep!r}\n\n\n{source[at:]}"


def completed(program: Path, example: Path) -> str:
    """The pair that the program makes of an example without a model, from generated/mutants if it is
    there."""
    package = sorted((ROOT / "sandbox" / "kernel_agent" / "differentiate").rglob("*.py"))
    key = digest(example.read_text(), *(path.read_text() for path in package))
    kept = ROOT / "generated" / "mutants" / f"{example.stem}-{key}.py"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        sweep = json.dumps(table("mutate_sweeps.toml").get(label(example), "all"))
        command = [str(program), "--file-path", str(example), "--backend", "none", "--no-optimise", "--json"]
        command += ["--quiet", "--out", str(kept.parent / "runs"), "--sweep", sweep.strip('"')]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=run.environment())
        result = json.loads(done.stdout or "{}")
        if result.get("verdict") != "verified":
            raise RuntimeError(f"{example}: {result.get('verdict', 'no result')}: {result.get('failures')}")
        kept.write_text(Path(result["pair"]).read_text())
    return kept.read_text()


def sources(options: argparse.Namespace, program: Path) -> list[Pair]:
    paths = [Path(pair) for pair in options.pairs]
    if not paths:
        draw = random.Random(options.seed)
        families = sorted(path for path in (ROOT / "dataset").iterdir() if path.is_dir())
        paths = sorted((ROOT / "examples").glob("*.py"))
        paths += [draw.choice(sorted(family.glob("*.py"))) for family in families]
    found = []
    for path in paths:
        source = path.read_text()
        if mutants.MARKER not in source:
            source = completed(program, path)
        found.append(Pair(label(path), source))
    return found


def label(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def choose(pairs: list[Pair], options: argparse.Namespace) -> None:
    """Which mutants of which pair: per file, then of all, then without those that are explained."""
    known = explanations()
    for pair in pairs:
        every = [m for m in mutants.of(pair.name, pair.source) if re.search(options.kinds, m.kind)]
        pair.made = len(every)
        pair.tried = mutants.sample(every, options.per_file, options.seed)
    if options.sample:
        kept = mutants.sample([m for pair in pairs for m in pair.tried], options.sample, options.seed)
        for pair in pairs:
            pair.tried = [m for m in kept if m.pair == pair.name]
    for pair in pairs:
        pair.explained = [m for m in pair.tried if m.key in known]
        pair.tried = [m for m in pair.tried if m.key not in known]


# ---- verdicts


def judge(program: Path, pairs: list[Pair], results: Results) -> None:
    """Verdicts on originals and then on their mutants, into `results`; says what survived."""
    todo = [
        (pair, source)
        for pair in pairs
        for source in (pair.source, *(mutant.source for mutant in pair.tried))
        if digest(source) not in results.known
    ]
    waiting = {pair.name for pair, _ in todo}
    for pair in pairs:
        if pair.name not in waiting:
            show(pair, results)
    with tempfile.TemporaryDirectory() as temporary:
        while todo:
            judged = 0
            for (pair, source), result in zip(todo, check(program, todo, Path(temporary)), strict=False):
                judged += 1
                results.add(source, {"verdict": result["verdict"], "facts": facts_of(result)[:600]})
                if judged == len(todo) or todo[judged][0] is not pair:
                    show(pair, results)
            if judged < len(todo):  # the program ended on this one
                results.add(todo[judged][1], {"verdict": "none", "facts": "no result"})
            todo = todo[judged + 1 :]


def check(program: Path, todo: list[tuple[Pair, str]], folder: Path) -> Iterator[dict[str, Any]]:
    """A result for each pair, as they come, from one process: its interpreters stay warm, and what it knows
    of a forward."""
    files = [folder / f"mutant_{at}.py" for at in range(len(todo))]
    for file, (pair, source) in zip(files, todo, strict=True):
        file.write_text(on_small_shapes(pair.name, source))
    files += files[:1] if len(files) == 1 else []  # of one file the program prints no line
    command = [str(program), "check", *map(str, files), *CHECK]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=run.environment()
    ) as child:
        assert child.stdout is not None
        try:
            for _ in todo:
                line = child.stdout.readline()
                if not line:
                    return
                yield json.loads(line)
        finally:
            child.terminate()


def facts_of(result: dict[str, Any]) -> str:
    return str(result.get("failures") or result.get("error", {}).get("message", ""))


def show(pair: Pair, results: Results) -> None:
    original = results.of(pair.source)
    if original["verdict"] != "verified":
        print(f"{pair.name}: the original is {original['verdict']}: {original['facts']}", flush=True)
        return
    killed = 0
    for mutant in pair.tried:
        result = results.of(mutant.source)
        killed += result["verdict"] == "not_verified"
        if result["verdict"] == "verified":
            print(f"SURVIVED {pair.name}:{mutant.line} {mutant.kind}\n{mutant.diff(pair.source)}", flush=True)
        elif result["verdict"] != "not_verified":
            text = result["facts"][:200]
            print(
                f"NOT JUDGED {pair.name}:{mutant.line} {mutant.kind}: {result['verdict']}: {text}", flush=True
            )
    print(f"{pair.name}: {killed}/{len(pair.tried)} killed, {len(pair.explained)} explained", flush=True)


# ---- the score


def cause(facts: str) -> str:
    """What a mutant was rejected for, by the first failure that is named."""
    first = next((line for line in facts.splitlines() if line.startswith("- (")), "")
    if ") raised: " in first:
        return "out of bounds" if "out of bounds" in facts else "raised"
    if "not finite" in first:
        return "not finite"
    return "values" if "the gradient of" in first.lower() else "rule"


def tally(pairs: list[Pair], results: Results) -> dict[str, Any]:
    """What --json writes: small, and with the reason for everything that was not killed."""
    known = explanations()
    kinds: dict[str, list[int]] = {}
    causes: dict[str, int] = {}
    files, alive = [], []
    for pair in pairs:
        if results.of(pair.source)["verdict"] != "verified":
            files.append({"pair": pair.name, "original": results.of(pair.source)["verdict"]})
            continue
        dead = 0
        for mutant in pair.tried:
            result = results.of(mutant.source)
            killed = result["verdict"] == "not_verified"
            dead += killed
            score = kinds.setdefault(mutant.kind, [0, 0])
            score[0] += killed
            score[1] += 1
            if killed:
                causes[cause(result["facts"])] = causes.get(cause(result["facts"]), 0) + 1
            else:
                alive.append(described(mutant) | {"class": "survivor", "verdict": result["verdict"]})
        for mutant in pair.explained:
            entry = known[mutant.key]
            if entry["class"] == "hole":
                kinds.setdefault(mutant.kind, [0, 0])[1] += 1
            alive.append(described(mutant) | {"class": entry["class"], "reason": entry["reason"]})
        holes = sum(known[mutant.key]["class"] == "hole" for mutant in pair.explained)
        tried = len(pair.tried) + holes
        files.append({"pair": pair.name, "made": pair.made, "killed": dead, "total": tried})
    return {
        "killed": sum(killed for killed, _ in kinds.values()),
        "total": sum(total for _, total in kinds.values()),
        "rejected_for": dict(sorted(causes.items())),
        "kinds": {kind: f"{killed}/{total}" for kind, (killed, total) in sorted(kinds.items())},
        "files": files,
        "not_killed": alive,
    }


def described(mutant: mutants.Mutant) -> dict[str, Any]:
    return {"pair": mutant.pair, "kind": mutant.kind, "at": mutant.at, "nth": mutant.nth, "new": mutant.new}


def summary(score: dict[str, Any]) -> str:
    classes = [entry["class"] for entry in score["not_killed"]]
    return (
        f"{score['killed']}/{score['total']} mutants killed, {classes.count('hole')} of the others known "
        "holes; not counted: "
        f"{classes.count('equivalent')} that compute the same, {classes.count('unobservable')} that cannot "
        "be told on the CPU"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*")
    parser.add_argument("--build", default="build", help="folder with kernel-agent")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kinds", default="", help="a regular expression for the kinds of mutation")
    parser.add_argument("--per-file", type=int, default=24, help="mutants tried of each file")
    parser.add_argument("--sample", type=int, default=0, help="mutants tried of all those (0: every one)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples, and of the choice of pairs")
    parser.add_argument("--results", type=Path, help="verdicts as they come, and those of an earlier run")
    parser.add_argument("--json", type=Path, help="write the score here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    program = Path(options.build).resolve() / "kernel-agent"
    pairs = sources(options, program)
    choose(pairs, options)
    pairs = [pair for pair in pairs if pair.tried]
    tried, made = sum(len(pair.tried) for pair in pairs), sum(pair.made for pair in pairs)
    print(f"{tried} of {made} mutants of {len(pairs)} pairs, seed {options.seed}", flush=True)
    results = Results(options.results)
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [pairs[at :: options.jobs] for at in range(options.jobs)]
        list(pool.map(lambda part: judge(program, part, results), parts))
    score = tally(pairs, results)
    if options.json:
        drawn = {"per_file": options.per_file, "sample": options.sample, "seed": options.seed}
        options.json.write_text(json.dumps(drawn | score, indent=1) + "\n")
    print(summary(score))
    rejected = any("original" in entry for entry in score["files"])
    return 1 if rejected or score["killed"] < LEAST_SCORE * score["total"] else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The mutation score: how many wrong backwards, made from right ones, the verdict rejects.

    tests/attacks/mutate.py [PAIR...] [--sample N] [--seed S] [--build DIR] [--jobs N] [--json FILE]

Without pairs: the examples, completed by `kernel-agent --backend none`, the controls of the attack suite, and 20 files of
dataset/. `--sample N` takes N mutants at random. Mutants that compute the same are listed in equivalent.toml, with the
reason, and count neither way. Prints every survivor with its diff, and `killed/total` at the end; exit code 1 if one survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import mutants
import run
import suite

ROOT = Path(__file__).resolve().parents[2]
DATASET_SAMPLE = 20


@dataclass
class Judged:
    mutant: mutants.Mutant
    verdict: str
    facts: str


def equivalents() -> dict[tuple[str, str, str], str]:
    """Reasons by (pair, kind, old text)."""
    with open(Path(__file__).parent / "equivalent.toml", "rb") as file:
        entries = tomllib.load(file)["mutant"]
    return {(entry["pair"], entry["kind"], entry["old"]): entry["reason"] for entry in entries}


def completed(program: Path, example: Path, folder: Path) -> str | None:
    """The pair that the program makes of an example without a model; None where it has none."""
    command = [str(program), "--file-path", str(example), "--backend", "none", "--no-optimise"]
    command += ["--out", str(folder), "--json", "--quiet"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=run.environment())
    result = json.loads(done.stdout or "{}")
    if result.get("verdict") != "verified":
        print(f"{example.name}: {result.get('verdict', 'no result')}: not mutated", flush=True)
        return None
    return Path(result["pair"]).read_text()


def sources(options: argparse.Namespace, program: Path, folder: Path) -> dict[str, str]:
    """Right pairs by name."""
    if options.pairs:
        return {name(Path(pair)): Path(pair).read_text() for pair in options.pairs}
    found = {f"controls/{c}.py": suite.pair(c, suite.control(c)) for c in suite.controls()}
    dataset = sorted((ROOT / "dataset").glob("*/*.py"))
    for path in random.Random(options.seed).sample(dataset, min(DATASET_SAMPLE, len(dataset))):
        found[name(path)] = path.read_text()
    for example in sorted((ROOT / "examples").glob("*.py")):
        if not options.no_examples and (source := completed(program, example, folder)):
            found[name(example)] = source
    return found


def name(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def smallest_shape(source: str) -> str:
    """The smallest required shape of the file, as --sweep wants it; "all" where it cannot be read off."""
    tree = ast.parse(source)
    for wanted in ("SWEEP_CPU", "SWEEP"):
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == wanted:
                try:
                    shapes = ast.literal_eval(node.value)
                except ValueError:
                    return "all"
                required = [s for s in shapes if s.get("required", True)]
                dims = [{k: v for k, v in s.items() if k != "required"} for s in required]
                return json.dumps([min(dims, key=_size)])
    return "all"


def _size(dims: dict[str, object]) -> int:
    size = 1
    for value in dims.values():
        size *= value if isinstance(value, int) and value > 0 else 1
    return size


def judge(program: Path, part: list[mutants.Mutant], folder: Path) -> list[Judged]:
    """The verdicts on mutants of one pair, by one process with warm interpreters."""
    files = []
    for at, mutant in enumerate(part):
        path = folder / f"{abs(hash(mutant.pair))}_{mutant.line}_{at}.py"
        path.write_text(mutant.source)
        files.append(str(path))
    files += files[:1] if len(files) == 1 else []  # a line for each, not one document
    command = [str(program), "check", *files, "--json", "--quiet", "--sweep", smallest_shape(part[0].source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=run.environment())
    judged = []
    for mutant, line in zip(part, done.stdout.splitlines(), strict=False):
        result = json.loads(line)
        facts = result.get("failures") or result.get("error", {}).get("message", "")
        judged.append(Judged(mutant, result["verdict"], facts))
    if len(judged) != len(part):
        raise RuntimeError(
            f"{part[0].pair}: {len(part) - len(judged)} mutants without a verdict: {done.stderr[-500:]}"
        )
    return judged


def show(judged: Judged, original: str) -> None:
    mutant = judged.mutant
    if judged.verdict == "verified":
        print(f"SURVIVED {mutant.pair}:{mutant.line} {mutant.kind}\n{mutant.diff(original)}", flush=True)
    elif judged.verdict != "not_verified":
        print(
            f"NOT JUDGED {mutant.pair}:{mutant.line} {mutant.kind}: {judged.verdict}: {judged.facts[:200]}",
            flush=True,
        )


def report(all_judged: list[Judged], equivalent: list[mutants.Mutant]) -> dict[str, object]:
    kinds: dict[str, list[int]] = {}
    for judged in all_judged:
        score = kinds.setdefault(judged.mutant.kind, [0, 0])
        score[0] += judged.verdict == "not_verified"
        score[1] += 1
    return {
        "killed": sum(killed for killed, _ in kinds.values()),
        "total": len(all_judged),
        "equivalent": len(equivalent),
        "kinds": {
            kind: {"killed": killed, "total": total} for kind, (killed, total) in sorted(kinds.items())
        },
        "survivors": [
            {
                "pair": j.mutant.pair,
                "line": j.mutant.line,
                "kind": j.mutant.kind,
                "old": j.mutant.old,
                "new": j.mutant.new,
            }
            for j in all_judged
            if j.verdict != "not_verified"
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*")
    parser.add_argument("--build", default="build", help="folder with kernel-agent")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument(
        "--no-examples", action="store_true", help="leave out the examples, which are completed first"
    )
    parser.add_argument("--json", help="write the score here")
    options = parser.parse_args()
    program = Path(options.build).resolve() / "kernel-agent"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        originals = sources(options, program, folder)
        known = equivalents()
        made = [m for pair, source in originals.items() for m in mutants.of(pair, source)]
        equivalent = [m for m in made if m.key in known]
        wrong = [m for m in made if m.key not in known]
        if options.sample and options.sample < len(wrong):
            wrong = random.Random(options.seed).sample(wrong, options.sample)
        by_pair = [[m for m in wrong if m.pair == pair] for pair in originals]
        all_judged: list[Judged] = []

        def work(part: list[mutants.Mutant]) -> None:
            for judged in judge(program, part, folder):
                all_judged.append(judged)
                show(judged, originals[judged.mutant.pair])

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(work, [part for part in by_pair if part]))
    score = report(all_judged, equivalent)
    if options.json:
        Path(options.json).write_text(json.dumps(score, indent=2) + "\n")
    print(f"{score['killed']}/{score['total']} mutants killed ({len(equivalent)} more are equivalent)")
    return 0 if score["killed"] == score["total"] else 1


if __name__ == "__main__":
    sys.exit(main())

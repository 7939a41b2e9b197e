#!/usr/bin/env python3
"""Drafts of the differentiator for the forwards of dataset/, without a model and without the tuner, judged.

    scripts/draft_all.py --out bench/results/drafts-h200.json [--device cuda] [--dtype bfloat16]
                         [--only REGEX] [--resume] [--jobs 10] [--budget SECONDS]
                         [--program build/kernel-agent] [--python PATH] [--work DIR]

Of each pair that names the dtype only the forward is given, for one shape of SWEEP_CPU and the last of SWEEP,
to one `kernel-agent batch`. The order is that of a hash of their names: what is done when --budget is over is
a sample. --resume leaves those alone that have a verdict for the same text and program; those that have one
of another come last. Rows of other files stay. A row that is not verified has its reason: a refusal with its
message, or what failed.

Exits 1 where a draft was refused or not verified.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded
from verify_dataset import NAMES, digest, dtypes_of, program_digest, reason, version_of

ROOT = Path(__file__).resolve().parents[1]
MARKER = "# ---- backward ----"
SHAPES = "SWEEP = [*SWEEP_CPU[:1], SWEEP[-1]]\n"
Entry = dict[str, Any]


def chosen(args: argparse.Namespace) -> list[str]:
    """The pairs that name the dtype, in an order that has nothing to do with what is in them."""
    paths = [p for p in (ROOT / "dataset").glob("*/*.py") if args.dtype in dtypes_of(p, "own")]
    names = [str(path.relative_to(ROOT)) for path in paths]
    ordered = sorted(names, key=lambda name: hashlib.sha256(Path(name).name.encode()).hexdigest())
    return [name for name in ordered if args.only.search(name)]


def row_of(name: str, result: Entry, args: argparse.Namespace, program: str) -> Entry:
    made: Entry = {"file": name, "sha256": digest([ROOT / name]), "program": program}
    made |= {"verdict": result["verdict"], "seconds": round(result["seconds"], 1)}
    made |= {"attempts": result["attempts"]}
    if result["verdict"] == "verified":
        return made | {"error": max(g["error"] or 0 for g in result["gradients"])}
    error = result.get("error") or {}
    refused = error.get("kind") == "unsupported_op"
    why = result.get("failures") or error.get("message") or "no reason"
    return made | {
        "verdict": "refused" if refused else "not verified",
        "reason": reason(" ".join(why.split())),
    }


def judged(names: list[str], args: argparse.Namespace) -> dict[str, Entry]:
    """The result objects of one batch, by pair."""
    shutil.rmtree(args.work, ignore_errors=True)
    forwards = args.work / "forwards"
    forwards.mkdir(parents=True)
    files = {f"p{at:03}_{Path(name).name}": name for at, name in enumerate(names)}
    for file, name in files.items():
        forward = (ROOT / name).read_text().partition(MARKER)[0].rstrip()
        (forwards / file).write_text(f"{forward}\n\n\n{SHAPES}")
    command = [args.program, "batch", forwards, "--jobs", args.jobs, "--device", args.device, "--json"]
    command += ["--dtype", args.dtype, "--backend", "none", "--no-optimise", "--no-retrieval"]
    command += ["--out", args.work / "runs", *(["--python", args.python] if args.python else [])]
    done = bounded.run(command, args.budget)
    try:
        found = json.loads(done.out)["files"]
    except (json.JSONDecodeError, KeyError):
        raise SystemExit(f"{done.why}: {done.err[-2000:]}") from None
    return {
        files[Path(one["file"]).name]: one["result"]
        for one in found
        if one.get("outcome") in ("verified", "not_verified")
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which the batch is ended")
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--python", default="")
    parser.add_argument("--work", type=Path, default=ROOT / "generated" / "drafts")
    return parser.parse_args()


def main() -> int:
    args = parse()
    program = program_digest(args.program)
    rows = json.loads(args.out.read_text())["results"] if args.out.exists() else []
    known: dict[str, Entry] = {row["file"]: row for row in rows}
    names = chosen(args)
    if not names:
        print(f"no pair matches {args.only.pattern!r} and names {args.dtype}", file=sys.stderr)
        return 2
    same = [n for n in names if known.get(n, {}).get("sha256") == digest([ROOT / n])]
    ended = {n for n in same if args.resume and known[n].get("program") == program}
    todo = sorted((name for name in names if name not in ended), key=lambda name: name in known)
    for name, result in judged(todo, args).items() if todo else ():
        known[name] = row_of(name, result, args, program)
        ended.add(name)
        if known[name]["verdict"] != "verified":
            print(f"{name}: {known[name]['verdict']}: {known[name]['reason']}")
    made: Entry = {"command": " ".join(sys.argv), "device": args.device, "dtype": args.dtype}
    made |= {"torch": version_of("torch"), "triton": version_of("triton"), "machine": bounded.machine()}
    made |= {"gpu": bounded.smi(NAMES) or []} if args.device == "cuda" else {}
    bounded.write_json(args.out, made | {"results": [known[name] for name in sorted(known)]})
    failed = sum(known[name]["verdict"] != "verified" for name in ended)
    print(f"{len(ended) - failed} verified, {failed} not, {len(names) - len(ended)} had no turn")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Backwards made without a model, timed beside eager PyTorch and torch.compile: the examples, and pairs of
dataset/ of which the forward alone is given.

    scripts/bench_all.py --out bench/results/bench-h200.json [--only REGEX] [--resume] [--jobs 4]
                         [--program build/kernel-agent] [--python PATH] [--seconds 6] [--budget SECONDS]
                         [--list FILE | --table FILE] [--pairs DIR [--make-only]]

--list names the pairs, one path a line (bench/gpu/geomean.txt); each is made and timed in bfloat16, or, where
its docstring names no such dtype, in one that it does. --table names operations by a JSON object
instead (bench/gpu/table.json): each a file with the one shape and dtype to make and time it for, and the
milliseconds that its backward should take. A file is made into a pair by the whole run,
tuner and all, with `--backend none`; then `bench` times it at its own SWEEP. Runs go --jobs at a time,
benches one after the other, each with a GPU to itself; of several GPUs all are used. Results are written as
each file ends; --resume leaves those alone that have times and whose text and program are the same. No file
begins after --budget seconds. --pairs keeps the pairs in a folder, where the next call finds those of the
same text and program: a GPU that is lent for half an hour makes pairs in one loan (--make-only) and times
them in another. A run that has taken most of --most seconds ends with the best that it has.

The summary is the geometric mean over files of what the others take over what ours takes, of the backward as
CUDA graphs (as plain calls where there is no graph), each file's own the geometric mean over its shapes.
Exits 1 where a file has no times, or, with --make-only, no pair.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded
from gpu import REFERENCES, SLOW, longest
from verify_dataset import NAMES, REASON_MAX, digest, dtypes_of, program_digest, reason, version_of

ROOT = Path(__file__).resolve().parents[1]
MARKER = "# ---- backward ----"
OTHERS = ("eager", "compile")
LOG_LINES = 40  # of a run that was ended
TUNED = 0.75  # of the time for a run after which it ends with the best that it has
Entry = dict[str, Any]


def forward_of(name: str) -> str:
    """What is above the marker, with a reference() to time against."""
    text = (ROOT / name).read_text().partition(MARKER)[0].rstrip() + "\n"
    return f"{text}\n\n{REFERENCES[name]}" if name in REFERENCES else text


def dtype_of(path: Path) -> str:
    """The dtype to time a file in, as people train: bfloat16 unless its docstring names others."""
    named = dtypes_of(path, "half") if path.is_relative_to(ROOT / "dataset") else ["bfloat16"]
    return "bfloat16" if "bfloat16" in named else named[0]


def ratios_of(result: Entry) -> Entry:
    """By peer: its time over ours, backward."""
    made: Entry = {}
    for peer in OTHERS:
        ways = result.get("geomean", {}).get("bwd", {})
        found = ways.get("graph", {}).get(peer) or ways.get("alone", {}).get(peer)
        if found:
            made[peer] = {name: found[name] for name in ("ratio", "faster", "slower", "shapes")}
    return made


def shapes_of(result: Entry) -> list[Entry]:
    """Milliseconds of each subject's backward, by shape."""
    rows: list[Entry] = []
    for shape in result.get("shapes", []):
        bwd = shape.get("passes", {}).get("bwd", {})
        ms = {
            name: (times.get("graph") or times.get("alone") or {}).get("median_ms")
            for name, times in bwd.get("subjects", {}).items()
        }
        rows.append({"dims": shape["dims"], "floor_ms": bwd.get("floor_ms"), "ms": ms})
    return rows


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.until = time.monotonic() + args.budget
        self.program = program_digest(args.program)
        self.table: dict[str, Entry] = json.loads(args.table.read_text()) if args.table else {}
        files = list(self.table)
        if not args.table:
            files = [f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))]
            files += [line for line in args.list.read_text().splitlines() if line and line[0] != "#"]
        self.files = [name for name in dict.fromkeys(files) if args.only.search(name)]
        self.known: dict[str, Entry] = {}
        if args.out.exists():
            self.known = {row["file"]: row for row in json.loads(args.out.read_text())["results"]}
        self.cards = bounded.Cards()
        self.alone = bounded.Cards(most=1)  # whoever times

    def path_of(self, name: str) -> Path:
        return ROOT / str(self.table.get(name, {}).get("file", name))

    def is_current(self, name: str) -> bool:
        row = self.known.get(name, {})
        path = self.path_of(name)
        same = row.get("sha256") == digest([path]) and row.get("program") == self.program
        same = same and row.get("dtype") == self.table.get(name, {}).get("dtype", dtype_of(path))
        return same and bool(row.get("ratios"))

    def command(self, *words: object, most: float) -> tuple[Entry, bounded.Ended]:
        more = ["--device", "cuda", "--json", *(["--python", self.args.python] if self.args.python else [])]
        done = bounded.run([self.args.program, *words, *more], most)
        try:
            return json.loads(done.out), done
        except json.JSONDecodeError:
            return {}, done

    def time(self, name: str) -> Entry:
        """Make the pair, unless it is kept, and time it."""
        path, asked = self.path_of(name), self.table.get(name, {})
        entry: Entry = {"file": name, "sha256": digest([path]), "program": self.program}
        entry |= asked or {"dtype": dtype_of(path)}
        entry["file"] = name  # by which results are known
        if time.monotonic() > self.until:
            return entry | {"reason": "had no turn"}
        folder = self.args.work / re.sub(r"\W+", "_", Path(name).stem)
        shape = ["--dtype", entry["dtype"], *(["--sweep", json.dumps([asked["dims"]])] if asked else [])]
        kept = self.args.pairs / f"{folder.name}-{entry['sha256'][:12]}.json" if self.args.pairs else None
        known: Entry = json.loads(kept.read_text()) if kept and kept.exists() else {}
        if known.get("program") == self.program:
            pair = self.place(name, folder) / path.name
            pair.write_text(known.pop("pair"))
            entry |= known
        else:
            entry |= self.make(name, folder, shape)
            if "reason" in entry:
                return entry
            pair = Path(entry.pop("pair"))
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                bounded.write_json(kept, entry | {"pair": pair.read_text()})
        if self.args.make_only:
            print(f"{name}: made", flush=True)
            return entry
        bench = ["bench", pair, "--only", "bwd", "--seconds", self.args.seconds, *shape]
        with self.alone.one() as card:
            result, done = self.command(*bench, *card, "--out", folder / "runs", most=self.args.most)
        entry |= {"ratios": ratios_of(result), "shapes": shapes_of(result)}
        if done.code != 0:
            told = [str(shape["error"]) for shape in result.get("shapes", []) if shape.get("error")]
            entry["reason"] = f"{done.why}: {reason(' '.join(told) or done.err.strip()[-REASON_MAX:])}"
        return entry

    def place(self, name: str, folder: Path) -> Path:
        """The folder, with what the file imports from beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        ops = self.path_of(name).with_name("ops")
        if name in self.table and ops.is_dir():
            shutil.copytree(ops, folder / "ops", dirs_exist_ok=True)
        return folder

    def make(self, name: str, folder: Path, shape: list[str]) -> Entry:
        """The run that makes a pair, whose path is `pair`; else `reason` says why not."""
        path, asked = self.path_of(name), self.table.get(name, {})
        forward = self.place(name, folder) / path.name
        forward.write_text(forward_of(str(asked.get("file", name))))
        words: list[object] = ["--file-path", forward, "--backend", "none", "--no-retrieval"]
        words += ["--out", folder / "runs", *shape, *bounded.share(self.args.jobs)]
        words += ["--max-seconds", int(TUNED * self.args.most)]
        with self.cards.one() as card:
            made, done = self.command(*words, *card, most=self.args.most)
        entry: Entry = {"verdict": made.get("verdict", "none"), "run_seconds": round(done.seconds, 1)}
        if made.get("verdict") != "verified":
            why = made.get("failures") or (made.get("error") or {}).get("message") or done.err[-REASON_MAX:]
            return entry | {"reason": reason(str(why)), "log": done.err.splitlines()[-LOG_LINES:]}
        entry |= {"tuned_ms": made.get("ms"), "attempts": made.get("attempts")}
        if not made.get("pair"):  # ended while it was optimised
            return entry | {"reason": f"no pair: {done.why}", "log": done.err.splitlines()[-LOG_LINES:]}
        if done.seconds > SLOW:
            entry["longest"] = longest(made.get("children") or [])
        return entry | {"pair": made["pair"]}

    def keep(self, entry: Entry) -> None:
        self.known[entry["file"]] = entry
        rows = [self.known[name] for name in sorted(self.known)]
        made: Entry = {
            "command": " ".join(sys.argv),
            "torch": version_of("torch"),
            "triton": version_of("triton"),
        }
        made |= {"machine": bounded.machine(), "gpu": self.args.gpus, "geomean": self.geomeans(rows)}
        bounded.write_json(self.args.out, made | {"results": rows})
        told = {peer: found["ratio"] for peer, found in entry.get("ratios", {}).items()}
        if not self.args.make_only or "reason" in entry:
            print(f"{entry['file']}: {told or entry.get('reason', 'no times')}", flush=True)

    def geomeans(self, rows: list[Entry]) -> Entry:
        made: Entry = {}
        for peer in OTHERS:
            found = [row["ratios"][peer]["ratio"] for row in rows if peer in row.get("ratios", {})]
            if found:
                mean = math.exp(sum(map(math.log, found)) / len(found))
                slower = sum(ratio < 1 for ratio in found)
                made[peer] = {"ratio": round(mean, 3), "files": len(found), "slower": slower}
        return made

    def all(self) -> int:
        todo = [name for name in self.files if not (self.args.resume and self.is_current(name))]
        with ThreadPoolExecutor(self.args.jobs) as pool:
            for future in as_completed([pool.submit(self.time, name) for name in todo]):
                if future.result().get("reason") != "had no turn":
                    self.keep(future.result())
        rows = [self.known[name] for name in self.files if name in self.known]
        for peer, mean in self.geomeans(rows).items():
            files = f"{mean['files']} files, slower in {mean['slower']}"
            print(f"{mean['ratio']:.2f} times as fast as {peer}, {files}")
        asked, what = ("tuned_ms", "made") if self.args.make_only else ("ratios", "timed")
        missing = [name for name in self.files if not self.known.get(name, {}).get(asked)]
        lack = "a pair" if self.args.make_only else "times"
        print(f"{len(self.files) - len(missing)} {what}, {len(missing)} without {lack}")
        return 1 if missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--program", type=Path, default=ROOT / "build" / "kernel-agent")
    parser.add_argument("--python", default="")
    parser.add_argument("--seconds", type=int, default=6, help="of one bench")
    parser.add_argument("--most", type=float, default=300, help="longest time for one command")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no file begins")
    parser.add_argument("--list", type=Path, default=ROOT / "bench" / "gpu" / "geomean.txt")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--pairs", type=Path, help="folder that keeps finished pairs")
    parser.add_argument("--make-only", action="store_true", help="time nothing")
    parser.add_argument("--work", type=Path, default=ROOT / "generated" / "bench")
    args = parser.parse_args()
    if args.make_only and not args.pairs:
        parser.error("--make-only makes what --pairs keeps")
    args.gpus = bounded.smi(NAMES) or []
    run = Run(args)
    if not run.files:
        print(f"no file matches {args.only.pattern!r}", file=sys.stderr)
        return 2
    return run.all()


if __name__ == "__main__":
    sys.exit(main())

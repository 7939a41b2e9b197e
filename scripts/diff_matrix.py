#!/usr/bin/env python3
"""What the differentiator can do alone: forward files through `kernel-agent`, judged by the verdict.

    scripts/diff_matrix.py [--program build/kernel-agent] [--device cpu] [--dtypes fp16,bf16,fp32] [--out
    FILE] [NAME ...]
    scripts/diff_matrix.py --store [...]        the forward part of every pair of dataset/ instead

Prints a line a file and keeps the rows in --out after each. A row is `verified`, `refused` (the
differentiator names a construct and a line), `not verified`, `unusable` or `late` (with the reason; late:
longer than --seconds); tape and atomics are given as kept/naive on the traced shape, lines are those of the
backward. Without --dtypes each file has its own. Exit code 1 where the verdict rejects a drafted backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded

ROOT = Path(__file__).resolve().parents[1]
MARKER = "# ---- backward ----"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

# Forward kernels for what a differentiator has to do, by the hardest thing in them.
STAGES = {
    "1 straight-line": [
        *["vector_add", "mul_div", "add_mul_chain", "two_outputs", "dot", "dot_mix", "softmax", "dropout", "swiglu"],
        *["rms_norm", "cross_entropy"],
    ],
    "2 loops that only add, proofs of stores": [
        *["block_matmul", "persistent_softmax", "layer_norm", "matmul", "group_norm", "embedding", "conv1d", "conv2d"],
    ],
    "3 carried state, scans": [
        *["logsumexp", "chunked_cross_entropy", "attention", "sliding_attention", "scans", "linear_attention"],
        *["linear_recurrence", "rnn_cell"],
    ],
    "4 host graph": ["in_place", "chunk_linear_attention", "split_k", "moe", "implicit_gemm_conv", "grouped_gemm"],
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    group: str
    name: str
    file: Path  # what is run
    shown: str  # what it is called in the results
    dtype: str  # "" is the file's own


def staged(names: list[str], dtypes: list[str]) -> list[Job]:
    """The kernels of the tests by stage, then the examples."""
    groups = {
        title: [ROOT / "tests/python/kernels" / f"{name}.py" for name in kernels]
        for title, kernels in STAGES.items()
    }
    groups["examples"] = sorted((ROOT / "examples").glob("*.py"))
    return [
        Job(title, file.stem, file, str(file.relative_to(ROOT)), dtype)
        for title, files in groups.items()
        for file in files
        if not names or file.stem in names
        for dtype in dtypes
    ]


def store(names: list[str], dtypes: list[str], folder: Path) -> list[Job]:
    """The forward parts of the pairs, each written to a file of its own below `folder`."""
    jobs = []
    for pair in sorted((ROOT / "dataset").glob("*/*.py")):
        if names and pair.stem not in names:
            continue
        file = folder / pair.parent.name / pair.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(pair.read_text().split(MARKER)[0])
        shown = str(pair.relative_to(ROOT))
        jobs += [Job(pair.parent.name, pair.stem, file, shown, dtype) for dtype in dtypes]
    return jobs


def answer(command: list[str], seconds: float) -> dict[str, Any]:
    """The result object that a command prints; an error where it printed none."""
    done = bounded.run(command, seconds)
    try:
        return json.loads(done.out)
    except json.JSONDecodeError:
        late = {"verdict": "late"} if done.code is None else {}
        return {**late, "error": {"message": f"{done.why}: {done.err.strip()[-400:]}"}}


def row(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """One file: the draft with its facts, then the verdict."""
    started = time.monotonic()
    options = ["--json", "--device", args.device, "--deadline", str(args.deadline), *bounded.share(args.jobs)]
    options += ["--dtype", job.dtype] if job.dtype else []
    options += ["--python", args.python] if args.python else []
    made: dict[str, Any] = {"group": job.group, "name": job.name, "file": job.shown}
    made["dtype"] = job.dtype or "its own"
    draft = answer([args.program, "differentiate", str(job.file), *options], args.seconds)
    if "report" not in draft:
        error = draft.get("error") or {}
        refused = error.get("kind") == "unsupported_op"
        line = f" (line {error['line']})" if error.get("line") else ""
        return made | {
            "verdict": "refused" if refused else draft.get("verdict", "unusable"),
            "construct": next((r["construct"] for r in draft.get("refusals", [])), None),
            "reason": f"{error.get('message', 'no answer')}{line}",
        }
    report = draft["report"]
    facts = ("tape_bytes", "tape_naive_bytes", "atomics", "atomics_naive", "schedule")
    made |= {key: report[key] for key in facts}
    made["lines"] = len(draft["backward"].splitlines())
    run = [args.program, "--file-path", str(job.file), "--backend", "none", "--draft", "differentiator"]
    result = answer([*run, "--no-optimise", "--out", args.runs, *options], args.seconds)
    verdict = {"not_verified": "not verified"}.get(str(result.get("verdict")), result.get("verdict", "error"))
    made |= {"verdict": verdict, "shapes": result.get("shapes")}
    if verdict == "verified":
        made["worst_error"] = max(g["error"] for g in result["gradients"])
    else:
        made["reason"] = (result.get("failures") or (result.get("error") or {}).get("message") or "")[:600]
    return made | {"seconds": round(time.monotonic() - started, 1)}


def line_of(made: dict[str, Any]) -> str:
    head = f"  {made['name']:32} {made['dtype']:8} {made['verdict']:12}"
    if "tape_bytes" not in made:
        return f"{head} {made['reason']}"
    tape = f"{made['tape_bytes']}/{made['tape_naive_bytes']}"
    atomics = f"{made['atomics']}/{made['atomics_naive']}"
    facts = f"tape {tape:>16} B   atomics {atomics:>5}   {made['lines']:4} lines"
    return f"{head} {facts}   {made.get('reason') or ''}".rstrip().replace("\n", " ")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    groups: dict[str, Counter[str]] = {}
    for made in rows:
        groups.setdefault(made["group"], Counter())[made["verdict"]] += 1
    total = Counter(made["verdict"] for made in rows)
    return {"total": dict(total), "groups": {name: dict(counts) for name, counts in groups.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--program", default=str(ROOT / "build/kernel-agent"))
    parser.add_argument("--python", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="", help="comma-separated: fp16, bf16, fp32, fp64")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--deadline", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=1e6, help="longest time for one step of one file")
    parser.add_argument("--runs", default="generated/matrix")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtypes = [DTYPES.get(name, name) for name in args.dtypes.split(",")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        jobs = store(args.names, dtypes, Path(folder)) if args.store else staged(args.names, dtypes)
        for job, made in zip(jobs, pool.map(lambda job: row(job, args), jobs), strict=True):
            if not rows or rows[-1]["group"] != job.group:
                print(job.group)
            rows.append(made)
            print(line_of(made), flush=True)
            if args.out:
                bounded.write_json(args.out, {"device": args.device, **summary(rows), "rows": rows})
    counts = summary(rows)["total"]
    print(" · ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())))
    return 1 if set(counts) - {"verified", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())

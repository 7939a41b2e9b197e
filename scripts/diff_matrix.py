#!/usr/bin/env python3
"""What the differentiator can do: every example and test kernel, drafted and compared with the oracle.

    .venv/bin/python scripts/diff_matrix.py [NAME ...]

A row is verified (all gradients within 1e-5 of the oracle's on the traced shape), wrong, or refused (with the construct and its
line); bytes of tape and number of atomic writes are given as kept/naive, lines are those of the backward section.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "sandbox"), str(ROOT / "tests/python")]

from diff_support import FP32, draft, errors
from kernel_agent import forward
from kernel_agent.errors import Unusable
from test_diff_kernels import EXAMPLES

STAGES = {
    1: ["add_mul_chain", "two_outputs", "dot_mix", "softmax", "swiglu", "rms_norm", "dropout"],
    2: [
        *["block_matmul", "persistent_softmax", "layer_norm", "matmul", "group_norm", "embedding"],
        *["conv2d", "cross_entropy"],
    ],
    3: ["chunked_cross_entropy", "attention", "sliding_attention", "scans", "linear_recurrence", "rnn_cell"],
    4: ["in_place", "chunk_linear_attention", "split_k", "moe", "implicit_gemm_conv", "grouped_gemm"],
}


def row(file: Path, dims: list[dict]) -> tuple[str, str]:
    """One verdict and the rest of its line."""
    started = time.monotonic()
    try:
        result = draft(file, dims[0])
    except Unusable as error:
        return "refused", f"{file.name}:{error.line}: {error}"
    drafted = time.monotonic() - started
    found = errors(file, result["backward"], [(d, "normal") for d in dims])
    worst = max((e for values in found.values() for e in values), default=float("nan"))
    report = result["report"]
    tape = f"{report['tape_bytes']}/{report['tape_naive_bytes']}"
    atomics = f"{report['atomics']}/{report['atomics_naive']}"
    lines = len(result["backward"].splitlines())
    text = (
        f"tape {tape:>16} B   atomics {atomics:>5}   {lines:4} lines   {drafted:4.1f} s   error {worst:.1e}"
    )
    return ("verified" if worst <= FP32 else "wrong"), text


def main(names: list[str]) -> int:
    counts: dict[str, int] = {}
    groups = {f"stage {n}": [ROOT / "tests/python/kernels" / f"{k}.py" for k in v] for n, v in STAGES.items()}
    groups["examples"] = [ROOT / "examples" / f"{name}.py" for name in sorted(EXAMPLES)]
    for title, files in groups.items():
        chosen = [f for f in files if not names or f.stem in names]
        if chosen:
            print(title)
        for file in chosen:
            dims = EXAMPLES[file.stem] if title == "examples" else [s.dims for s in forward.load(file).sweep]
            verdict, text = row(file, dims)
            counts[verdict] = counts.get(verdict, 0) + 1
            print(f"  {file.stem:24} {verdict:9} {text}", flush=True)
    print(" · ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items())))
    return 1 if counts.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

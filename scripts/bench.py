#!/usr/bin/env python3
"""All benchmarks that need no GPU: scripts/bench.py --build build --out bench/results/bench-cpu.json"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bounded

ROOT = Path(__file__).resolve().parents[1]
ROWS = (500, 100_000, 1_000_000)
DIM = 256
ROUNDS = 12
SLICE_SECONDS = 0.05


def output_of(*command: str | Path) -> dict[str, Any]:
    return json.loads(subprocess.check_output(bounded.argv(command), cwd=ROOT))


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    load = round(os.getloadavg()[0], 1)
    return {"processor": [*names, platform.machine()][0], **bounded.machine(), "load_before": load}


class Measured:
    """A benchmark process that is asked for one measurement at a time."""

    def __init__(self, command: list[str | Path]) -> None:
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(bounded.argv(command), cwd=ROOT, env=env, **pipes)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.asked, self.answers = self.process.stdin, self.process.stdout
        if self.answers.readline().strip() != "ready":
            raise RuntimeError(f"{command[0]} did not start")

    def ask(self, kind: str, seconds: float) -> float:
        self.asked.write(f"{kind} {seconds}\n")
        self.asked.flush()
        return float(self.answers.readline())

    def close(self) -> None:
        self.asked.close()
        self.process.wait()


def bench_search(build: Path, rows: int) -> dict[str, Any]:
    """Our search, its product, a loop that reads the matrix, and NumPy, in turns; the best of each.

    A matrix of 500 rows lies in the processor's cache: there the loop measures the cache, not the memory.
    """
    ours = Measured([build / "tests" / "bench_search", "--rows", str(rows)])
    numpy = Measured([sys.executable, ROOT / "scripts" / "bench_numpy.py", "--rows", str(rows)])
    whose = {kind: (ours, kind) for kind in ("search", "product", "read")}
    whose |= {f"numpy_{kind}": (numpy, kind) for kind in ("search", "product")}
    best = dict.fromkeys(whose, float("inf"))
    for _ in range(ROUNDS):
        for name, (process, kind) in whose.items():
            best[name] = min(best[name], process.ask(kind, SLICE_SECONDS))
    ours.close()
    numpy.close()
    return {
        "rows": rows,
        **{f"{name}_ms": round(seconds * 1e3, 5) for name, seconds in best.items()},
        "read_gb_per_s": round(rows * DIM * 4 / best["read"] / 1e9, 1),
        "search_over_bandwidth": round(best["read"] / best["search"], 2),
        "product_over_bandwidth": round(best["read"] / best["product"], 2),
        "numpy_time_over_search_time": round(best["numpy_search"] / best["search"], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    build = args.build.resolve()
    turn = output_of(sys.executable, ROOT / "scripts" / "bench_turn.py", "--program", build / "kernel-agent")
    result: dict[str, Any] = {
        "command": "make bench",
        "machine": machine(),
        "turn": turn,
        "search": [bench_search(build, rows) for rows in ROWS],
        **output_of(build / "tests" / "bench_search"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

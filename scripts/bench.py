#!/usr/bin/env python3
"""All benchmarks that need no GPU, in one file: scripts/bench.py --build build --out bench/results/bench-cpu.json"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def output_of(*command: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.split(":")[1].strip() for line in info if line.startswith("model name")), platform.machine()
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    build = args.build.resolve()
    result: dict[str, Any] = {"command": "make bench", "machine": machine()}
    search = output_of(build / "tests" / "bench_search", "--python", sys.executable)
    turn = output_of(sys.executable, ROOT / "scripts" / "bench_turn.py", "--program", build / "kernel-agent")
    numpy = {entry["rows"]: entry for entry in search.get("numpy") or []}
    ratios = {
        str(entry["rows"]): {
            "search_over_memory_bandwidth": round(entry["ratio"], 2),
            "numpy_time_over_search_time": round(numpy[entry["rows"]]["search_ms"] / entry["search_ms"], 2),
        }
        for entry in search["search"]
        if entry["rows"] in numpy and "ratio" in entry
    }
    result = {"ratios_by_rows": ratios, "turn": turn, **result, "search": search}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        json.dumps(
            {"ratios_by_rows": ratios, "turn": turn, "embed": search["embed"], "memory": search["memory"]},
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

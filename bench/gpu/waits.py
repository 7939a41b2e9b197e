"""Where the time of runs on shared GPUs goes: how long each waited to have its card alone, and was stopped.

    bench/gpu/waits.py FOLDER [--out FILE]      FOLDER holds runs' folders, at any depth

Read from the runs' journals. `waited` is what passes before an operation bench begins, `paused` how long a
run's children were stopped in all since others timed kernels, `context` what a CUDA context took them, the
median.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any


def row_of(journal: Path) -> dict[str, Any]:
    """A run, in seconds."""
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    waited, before = 0.0, events[0]["t"]
    children = [event for event in events if event["event"] == "child"]
    for event in events:
        if event["event"] == "child" and event["op"] == "bench":
            waited += max(0.0, event["t"] - before - event["ms"] / 1e3)
        before = event["t"]
    contexts = [event["context_seconds"] for event in children if event.get("context_seconds")]
    return {
        "run": journal.parent.name,
        "seconds": round(events[-1]["t"] - events[0]["t"], 1),
        "benches": sum(event["op"] == "bench" for event in children),
        "waited": round(waited, 1),
        "paused": round(sum(event.get("paused_ms", 0) for event in children) / 1e3, 1),
        "context": round(statistics.median(contexts), 2) if contexts else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = sorted((row_of(path) for path in args.folder.rglob("run.jsonl")), key=lambda row: row["run"])
    text = json.dumps(rows, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

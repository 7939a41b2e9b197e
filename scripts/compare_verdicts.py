#!/usr/bin/env python3
"""Where two results of scripts/check_all.py differ, file by file: scripts/compare_verdicts.py CPU.json
GPU.json [--json OUT]

A file whose turn did not come in one of them ("not reached", or absent) is listed, and compared with nothing.
Exits 1 when a verdict differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

REACHED = ("verified", "not_verified", "unusable", "error", "waiting")


def entries(path: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    document = json.loads(path.read_text())
    return document["device"], {entry["file"]: entry for entry in document["results"]}


def reason(entry: dict[str, Any]) -> str:
    text = entry.get("failures") or (entry.get("error") or {}).get("message") or ""
    return " ".join(str(text).split())[:300]


def worst_ratio(entry: dict[str, Any]) -> float | None:
    """The largest error over that of eager PyTorch among the gradients."""
    pairs = [(g.get("error"), g.get("baseline_error")) for g in entry.get("gradients", [])]
    ratios = [error / base for error, base in pairs if error is not None and base]
    return round(max(ratios), 2) if ratios else None


def compare(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> dict[str, Any]:
    same, differ, missing = [], [], []
    for name in sorted(one.keys() | other.keys()):
        pair = [side.get(name, {"verdict": "absent"}) for side in (one, other)]
        verdicts = [entry["verdict"] for entry in pair]
        if any(verdict not in REACHED for verdict in verdicts):
            missing.append({"file": name, "verdicts": verdicts})
        elif verdicts[0] != verdicts[1]:
            differ.append({"file": name, "verdicts": verdicts, "reasons": [reason(entry) for entry in pair]})
        else:
            ratios = [worst_ratio(entry) for entry in pair]
            same.append({"file": name, "verdict": verdicts[0], "error_over_eager": ratios})
    return {"same": same, "differ": differ, "not_compared": missing}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs=2, type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (device, one), (other_device, other) = (entries(path) for path in options.results)
    found = compare(one, other)
    for entry in found["differ"]:
        print(
            f"{entry['file']}: {entry['verdicts'][0]} on {device}, {entry['verdicts'][1]} on {other_device}"
        )
        for where, text in zip((device, other_device), entry["reasons"], strict=True):
            if text:
                print(f"    {where}: {text}")
    for entry in found["not_compared"]:
        print(f"{entry['file']}: not compared ({entry['verdicts'][0]} and {entry['verdicts'][1]})")
    print(
        f"{len(found['same'])} verdicts equal on {device} and {other_device}, {len(found['differ'])} differ, "
        f"{len(found['not_compared'])} not compared"
    )
    if options.json:
        options.json.write_text(json.dumps({"devices": [device, other_device], **found}, indent=1) + "\n")
    return 1 if found["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())

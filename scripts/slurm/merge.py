#!/usr/bin/env python3
"""What the parts of a batch found, as one: OUT/summary.json, OUT/summary.xml, and a table.

    merge.py OUT PARTS

Exit code: the largest of the files', as of a batch; 1 where a part left nothing, which is named.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any


def read_part(path: Path) -> dict[str, Any] | None:
    """What a part printed; None where it left nothing, or half of it."""
    try:
        doc = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return doc if isinstance(doc, dict) and isinstance(doc.get("files"), list) else None


def merge_junit(parts: Path, numbers: range, to: Path) -> None:
    merged = ET.Element("testsuites", name="kernel-agent batch")
    for number in numbers:
        try:
            merged.extend(ET.parse(parts / f"{number}.xml").getroot())
        except (OSError, ET.ParseError):
            continue  # it is missing in the summary too
    ET.ElementTree(merged).write(to, encoding="utf-8", xml_declaration=True)


def merge(out: Path, count: int) -> dict[str, Any]:
    numbers = range(1, count + 1)
    read = {number: read_part(out / "parts" / f"{number}.json") for number in numbers}
    found = [doc for doc in read.values() if doc]
    files = sorted((entry for doc in found for entry in doc["files"]), key=lambda entry: entry["file"])
    missing = [number for number, doc in read.items() if not doc]
    codes = [int(doc["exit_code"]) for doc in found] + [1 for _ in missing]
    merge_junit(out / "parts", numbers, out / "summary.xml")
    return {
        "files": files,
        "parts": count,
        "missing_parts": missing,
        "outcomes": dict(Counter(entry["outcome"] for entry in files)),
        "seconds_of_work": sum(doc["seconds"] for doc in found),
        "exit_code": max(codes, default=1),
    }


def show(summary: dict[str, Any]) -> None:
    width = max((len(entry["file"]) for entry in summary["files"]), default=4)
    print(f"{'file':{width}}  {'outcome':13} {'exit':>4}")
    for entry in summary["files"]:
        print(
            f"{entry['file']:{width}}  {entry['outcome']:13} {entry['exit_code']:4d}  {entry['reason'] or ''}"
        )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(summary["outcomes"].items()))
    print(f"{len(summary['files'])} files in {summary['parts']} parts: {counts or 'none'}")
    for number in summary["missing_parts"]:
        print(f"part {number} left nothing: see parts/{number}.log")


def main() -> int:
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    summary = merge(out, int(sys.argv[2]))
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary)
    return int(summary["exit_code"])


if __name__ == "__main__":
    sys.exit(main())

"""Operation sanitize: a pair's forward and backward below NVIDIA's compute-sanitizer, one run a tool, and what it reported.

The tool watches compiled kernels on a GPU. The watched process is a child of its own that runs the operation candidate without
poisoned memory and guard bands, and without the allocator's cache: a tool that is to see uninitialised reads and accesses past an
allocation needs every tensor to be an allocation of its own, as fresh as the driver gave it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck")
_LIMIT = 20  # findings a tool
_PREFIX = "========="
_WHAT = re.compile(r"^(Invalid |Uninitialized |Misaligned |Error: |Warning: Race|Barrier error|Program hit )")
# "at kernel+0x1f0 in file.py:52", and as older versions have it "at 0x1f0 in file.py:52:kernel"
_NEW_PLACE = re.compile(
    r"\bat (?P<kernel>[\w<>:, ]+?)(?:\([^)]*\))?\+0x[0-9a-f]+ in (?P<file>.+?):(?P<line>\d+)\b"
)
_OLD_PLACE = re.compile(r"\bat 0x[0-9a-f]+ in (?P<file>.+?):(?P<line>\d+):(?P<kernel>[\w<>:]+)")
_SUMMARY = re.compile(r"^(ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """`{"runs": [{"tool", "complete", "findings": [{"what", "kernel", "file", "line"}], "tail"}]}`."""
    return {"runs": [_watch(tool, request, scratch) for tool in request.get("tools") or TOOLS]}


def _watch(tool: str, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    inner = scratch / tool
    inner.mkdir()
    asked = {
        key: request.get(key) for key in ("nonce", "file", "device", "target", "dtype", "entry", "cases")
    }
    (inner / "request.json").write_text(json.dumps(asked | {"op": "candidate", "plain": True}))
    command = [request["sanitizer"], "--tool", tool, "--print-limit", str(_LIMIT)]
    command += [sys.executable, "-m", "kernel_agent.child", str(inner)]
    done = subprocess.run(
        command,
        cwd=inner,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    ran = (inner / "result.json").exists()
    report = parse(done.stdout)
    lines = done.stdout.strip().splitlines()
    return {
        "tool": tool,
        **report,
        "complete": report["complete"] and ran,
        "tail": "\n".join(lines[-5:])[-600:],
    }


def parse(text: str) -> dict[str, Any]:
    """A report's findings, each once, with how often it came; `complete` where the tool wrote its summary.

    A summary that counts errors which no finding explains is a finding itself.
    """
    found: list[dict[str, Any]] = []
    complete, counted = False, 0
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        said = line.removeprefix(_PREFIX).strip()
        summary = _SUMMARY.match(said)
        if summary:
            complete, counted = True, int(summary["count"])
        elif _WHAT.match(said):
            found.append({"what": said, "kernel": None, "file": None, "line": None})
        place = _NEW_PLACE.search(said) or _OLD_PLACE.search(said)
        if place and found and found[-1]["kernel"] is None:
            found[-1] |= {
                "kernel": place["kernel"].strip(),
                "file": place["file"],
                "line": int(place["line"]),
            }
            if said == found[-1]["what"]:  # a race names its place on the same line
                found[-1]["what"] = said[: place.start()].strip()
    if counted and not found:
        found.append(
            {"what": f"{counted} errors without a description", "kernel": None, "file": None, "line": None}
        )
    return {"complete": complete, "findings": _once(found)}


def _once(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every thread reports for itself: one finding a kernel, line and kind is enough."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for finding in found:
        key = (finding["what"], finding["kernel"], finding["line"])
        made.setdefault(key, finding | {"times": 0})["times"] += 1
    return list(made.values())

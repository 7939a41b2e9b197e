"""Operation sanitize: a pair below NVIDIA's compute-sanitizer, one run a tool, and what it reported.

The tool watches compiled kernels on a GPU. The watched process is a child of its own that runs the operation
candidate without poisoned memory and guard bands, and without the allocator's cache: a tool that is to see
uninitialised reads and accesses past an allocation needs every tensor to be an allocation of its own, as
fresh as the driver gave it.

The tools run side by side, each with a time limit, and they look at the backward's kernels alone: a program
with torch in it loads thousands of kernels, and to rewrite each of them takes minutes. initcheck is the
exception: it has to see every write, so it looks at all kernels that are launched; of what it finds only what
lies in the backward's kernels counts.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..source import MARKER, tree_nodes

TOOLS = ("memcheck", "racecheck", "initcheck")
SECONDS = 100.0  # for one tool, unless the request says otherwise
_LIMIT = {
    "initcheck": 10000
}  # reports a tool; every thread makes its own, and initcheck's are not of the backward alone
_REPORT_MAX = 4 << 20  # bytes of a report that are read
_PREFIX = "========="
_WHAT = re.compile(
    r"^(Invalid |Uninitialized |Misaligned |Potential invalid |Barrier |Program hit |Host API "
    r"|(?i:error|warning): (Race|Potential|\(Warp))"
)
# What says that the tool has not seen everything.
_UNSEEN = re.compile(r"^(Internal Sanitizer Error|Internal error|Error: (?!Race|Potential))")
# "at kernel+0x1f0 in file.py:52", and as older versions have it "at 0x1f0 in file.py:52:kernel"
_NEW_PLACE = re.compile(
    r"\bat (?P<kernel>[\w<>:, ]+?)(?:\([^)]*\))?\+0x[0-9a-f]+(?: in (?P<file>.+?):(?P<line>\d+)\b)?"
)
_OLD_PLACE = re.compile(r"\bat 0x[0-9a-f]+ in (?P<file>.+?):(?P<line>\d+):(?P<kernel>[\w<>:]+)")
# The first and the other accesses of a race, each with its kind and the address of its instruction.
_RACE = re.compile(r"(?:reported between|^and) (?P<kind>Read|Write) access at (?P<at>\S+\+0x[0-9a-f]+)")
_SUMMARY = re.compile(r"^(ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op sanitize."""
    seconds = float(request.get("tool_seconds") or SECONDS)
    kernels = kernels_of(Path(request["file"]).read_text())
    watched = [start(tool, kernels, request, scratch) for tool in request.get("tools") or TOOLS]
    try:
        return {"kernels": kernels, "runs": [one.finish(seconds) for one in watched]}
    finally:
        for one in watched:
            end_tree(one.process)


def kernels_of(text: str) -> list[str]:
    """Names of the Triton kernels below the marker; of all in a file that has none there."""
    names = {
        node.name: node.lineno
        for node in tree_nodes(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(made).split("(")[0].split(".")[-1] == "jit" for made in node.decorator_list)
    }
    lines = text.splitlines()
    below = lines.index(MARKER) + 1 if MARKER in lines else 0
    return [name for name, line in names.items() if line > below] or list(names)


def options(tool: str, kernels: list[str]) -> list[str]:
    """What all versions since CUDA 12.3 understand, `--kernel-name` once a kernel: a kernel that any of them
    names is looked at."""
    filtered = [] if tool == "initcheck" else kernels
    return [
        *["--tool", tool, "--print-limit", str(_LIMIT.get(tool, 20))],
        *["--target-processes", "application-only", "--launch-timeout", "60", "--kill"],
        *["--nvtx", "no", "--show-backtrace", "device", "--check-exit-code", "no"],
        *["--check-device-heap", "no"],  # with it, older drivers load every kernel of torch at once
        *(["--leak-check", "no", "--report-api-errors", "no"] if tool == "memcheck" else []),
        *(part for name in filtered for part in ("--kernel-name", f"kernel_substring={name}")),
    ]


def environment(tool: str, folder: Path) -> dict[str, str]:
    """Kernels are loaded when they are first launched; each tensor has memory of its own where a tool looks
    at global memory."""
    caching: dict[str, str] = {} if tool == "racecheck" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return {**os.environ, "CUDA_MODULE_LOADING": "LAZY", "TMPDIR": str(folder), **caching}


@dataclass
class Watched:
    """A tool at work, its report going into a file."""

    tool: str
    kernels: list[str]
    folder: Path
    process: subprocess.Popen[bytes]
    report: IO[bytes]
    begun: float

    def finish(self, seconds: float) -> dict[str, Any]:
        """Waits until `seconds` after the start; what is still running then is ended."""
        late = None
        try:
            self.process.wait(max(0.0, self.begun + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = f"ran past {seconds:g} s"
            end_tree(self.process)
        spent = time.monotonic() - self.begun
        self.report.seek(0)
        text = self.report.read(_REPORT_MAX).decode(errors="replace")
        self.report.close()
        report = parse(text)
        reason = late or report.pop("unseen") or _not_to_the_end(report, self.folder / "result.json")
        report.pop("unseen", None)
        kept = [one for one in report["findings"] if self._is_the_candidates(one)]
        lines = text.strip().splitlines()
        return {
            "tool": self.tool,
            "complete": reason is None,
            "reason": reason,
            "seconds": round(spent, 1),
            "findings": [one for one in kept if not one["redundant"]],
            "redundant": [one for one in kept if one["redundant"]],
            "elsewhere": len(report["findings"]) - len(kept),
            "tail": "\n".join(lines[-5:])[-600:],
        }

    def _is_the_candidates(self, finding: dict[str, Any]) -> bool:
        kernel = finding["kernel"]
        if kernel is None:  # a copy by torch of memory that no kernel has read is nobody's
            return not finding["what"].startswith("Host API")
        return any(name in kernel for name in self.kernels)


def start(tool: str, kernels: list[str], request: dict[str, Any], scratch: Path) -> Watched:
    inner = scratch / tool
    inner.mkdir()
    asked = {
        key: request.get(key) for key in ("nonce", "file", "device", "target", "dtype", "entry", "cases")
    }
    (inner / "request.json").write_text(json.dumps(asked | {"op": "candidate", "plain": True}))
    command = [request["sanitizer"], *options(tool, kernels)]
    command += [sys.executable, "-m", "kernel_agent.child", str(inner)]
    report = (inner / "report.txt").open("w+b")
    process = subprocess.Popen(
        command,
        cwd=inner,
        env=environment(tool, inner),
        stdin=subprocess.DEVNULL,
        stdout=report,
        stderr=subprocess.STDOUT,
    )
    return Watched(tool, kernels, inner, process, report, time.monotonic())


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs, and what it started. The tool's own children outlive it otherwise."""
    if process.poll() is not None:
        return
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, as /proc has them now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for above in found:
        found += [below for below, parent in parents.items() if parent == above]
    return found[1:]


def _not_to_the_end(report: dict[str, Any], result: Path) -> str | None:
    """Why a report of a tool that ended by itself is not the whole: the operation below it failed, or it
    wrote no summary."""
    try:
        said = json.loads(result.read_text())
    except (OSError, ValueError):
        return "the watched process left no result"
    errors = [said.get("error")] + [case.get("error") for case in said.get("cases") or []]
    failed = next((error for error in errors if error), None)
    if failed:
        return f"the watched run failed: {str(failed.get('message'))[:300]}"
    if any(not case.get("launches_backward") for case in said.get("cases") or [{}]):
        return "the watched run launched no kernel in its backward"
    return None if report["complete"] else "the tool wrote no summary"


def parse(text: str) -> dict[str, Any]:
    """A report's findings, each once, with how often it came; `complete` where the tool wrote its summary,
    `unseen` what it says it missed.

    A summary that counts errors which no finding explains is a finding itself. A race of one store with
    itself is `redundant`: lanes that hold one reduced value each write it to the one place in shared memory,
    as Triton lowers a reduction whose layout is converted (triton-lang/triton, issue 7264). Their values may
    differ in the last bit; no kernel's author can do anything about it.
    """
    found: list[dict[str, Any]] = []
    races: list[set[tuple[str, str]]] = []  # accesses of each finding
    complete, counted, unseen = False, 0, None
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        said = line.removeprefix(_PREFIX).strip()
        summary = _SUMMARY.match(said)
        if summary:
            complete, counted = True, int(summary["count"])
        elif _WHAT.match(said):
            found.append({"what": said, "kernel": None, "file": None, "line": None})
            races.append(set())
        elif _UNSEEN.match(said):
            unseen = unseen or said[:300]
        race = _RACE.search(said)
        if race and races:
            races[-1].add((race["kind"], race["at"]))
        place = _NEW_PLACE.search(said) or _OLD_PLACE.search(said)
        if place and found and found[-1]["kernel"] is None:
            found[-1] |= {
                "kernel": place["kernel"].strip(),
                "file": place["file"],
                "line": int(place["line"]) if place["line"] else None,
            }
            if said == found[-1]["what"]:  # a race names its place on the same line
                found[-1]["what"] = said[: place.start()].strip()
    if counted and not found and not unseen:
        found.append(
            {"what": f"{counted} errors without a description", "kernel": None, "file": None, "line": None}
        )
        races.append(set())
    for finding, accesses in zip(found, races, strict=True):
        finding["redundant"] = {kind for kind, _ in accesses} == {"Write"} and len(accesses) == 1
    return {"complete": complete, "findings": _once(found), "unseen": unseen}


def _once(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every thread reports for itself: one finding a kernel, line and kind is enough."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for finding in found:
        key = (finding["what"], finding["kernel"], finding["line"], finding["redundant"])
        made.setdefault(key, finding | {"times": 0})["times"] += 1
    return list(made.values())

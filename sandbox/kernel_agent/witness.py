"""A candidate runs in a process of its own, and torch records there what it does: out of the code's reach.

    result, record = apart(lambda: ..., watched=True)

`apart` forks before any of the candidate's code is loaded. In the fork torch's own observer writes every
operation, from C++, into a pipe that this process reads: no name of Python leads to an entry, and what is
in the pipe cannot be taken back. `mark()` writes into the same record where a phase begins and ends; between
phases nothing is recorded, which is most of the operations. What the candidate's process says of itself is
held against it as before (candidate.py); this is held against it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import select
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import Unusable

_ANSWER_MAX = 1 << 28
_NODES_MAX = 2_000_000
_PIPE = 1 << 20  # bytes: the candidate does not wait for its reader
_OTHER = "-"  # the mark after a phase: what follows is the judge's own work
_PART = re.compile(  # of a node, a line; the group that is last says which
    rb'^ *"(?:id": (?P<id>\d+), "name": "(?P<name>.*)", "ctrl_deps": (?P<parent>\d+)|inputs"(?P<given>.*)'
    rb'|outputs"(?P<made>.*)|attrs"(?P<attributes>.*)|(?P<end>finish_ts)"|(?P<odd>id)")',
    re.MULTILINE,
)
_SCHEMA = re.compile(rb'"op_schema", "type": "string", "value": "([\w:.]+)\(')
_FLOATING = re.compile(rb"Tensor\((?:float|double|c10::(?:Half|BFloat16|Float8|complex))")
_ENGINE = "autograd::engine::evaluate_function: "
_FORMULA = re.compile(r"Backward\d+$")  # of torch's own; a Function's name has no number after it

_nonce: str | None = None
_observing = False
_list = os.listdir  # before a candidate is loaded


def mark(what: str | None) -> None:
    """The phase `what` begins in the record, or ends where it is None. Nothing where there is no record."""
    if _nonce is None:
        return
    if not _observing:
        _observe(True)
    with torch.profiler.record_function(f"{_nonce} {what or _OTHER}"):
        pass
    if what is None and _is_alone():
        _observe(False)


def _observe(on: bool) -> None:
    """Torch writes its operations into the record, or no more."""
    global _observing
    observer = torch._C._profiler
    with _silent():
        if on:
            observer._enable_execution_trace_observer()
        else:
            observer._disable_execution_trace_observer()
    _observing = on


def _is_alone() -> bool:
    """Whether no thread but this one may be amid an operation: those are written as they end."""
    try:
        return len(_list("/proc/self/task")) == 1
    except OSError:
        return False


@dataclass
class _Node:
    name: str
    parent: int
    operation: str | None = None  # with its overload
    floating: bool = False


@dataclass
class Record:
    """What torch did, by phase: `operations("3 backward")` counts operations on floating values."""

    nonce: str
    nodes: dict[int, _Node] = field(default_factory=dict)
    whole: bool = False  # whether its end was reached
    _odd: bool = False  # whether the observer would not have written it so
    _last: int = 0
    _rest: bytes = b""
    _counts: dict[str, Counter[str]] | None = None

    def feed(self, data: bytes) -> None:
        """More of the observer's text, whose nodes have a line for each part. Names stand in it as they are,
        and one with lines of its own could tell of other nodes: each is told of once, and none after the end.
        """
        text, _, self._rest = (self._rest + data).rpartition(b"\n")
        for part in _PART.finditer(text):
            kind = part.lastgroup
            if kind == "parent" and len(self.nodes) < _NODES_MAX:
                self._last = int(part["id"])
                self._odd |= self._last in self.nodes or self.whole
                self.nodes[self._last] = _Node(_text(part["name"]), int(part["parent"]))
            elif kind in ("parent", "odd"):
                self._odd = True  # too many nodes, or a name that is not on its line
            elif kind == "end":
                self.whole = True
            elif (node := self.nodes.get(self._last)) is None:
                continue
            elif kind == "attributes":
                schema = _SCHEMA.search(part["attributes"])
                node.operation = _text(schema[1]) if schema else None
            elif kind == "made" or node.name == "aten::_local_scalar_dense":
                node.floating |= _FLOATING.search(part[kind or 0]) is not None

    def operations(self, phase: str, engine_may: frozenset[str] = frozenset()) -> dict[str, int] | None:
        """None where the record has no such phase, or no end: nothing is known then."""
        if self._counts is None:
            self._counts = self._count()
        counts = self._counts.get(phase)
        if self._odd or not self.whole or counts is None:
            return None
        found: Counter[str] = Counter()
        for name, count in counts.items():
            plain = name.removeprefix(_ENGINE)
            if plain == name or plain not in engine_may:
                found[plain] += count
        return dict(sorted(found.items()))

    def _count(self) -> dict[str, Counter[str]]:
        """By phase. Of nested operations the outermost counts that is no mere composition of others; the
        engine's own have its name before theirs. Numbers rise with time."""
        counts: dict[str, Counter[str]] = {}
        now: Counter[str] | None = None
        for at in sorted(self.nodes):
            node = self.nodes[at]
            if node.name.startswith(f"{self.nonce} "):
                phase = node.name.removeprefix(f"{self.nonce} ")
                now = None if phase == _OTHER else counts.setdefault(phase, Counter())
                if now is not None:
                    now.clear()  # a case that is run again
            elif now is not None and node.floating and self._counts_itself(node):
                now[self._whose(node) + node.name] += 1
        return counts

    def _counts_itself(self, node: _Node) -> bool:
        return _is_work(node) and not any(_is_work(outer) for outer in self._around(node))

    def _around(self, node: _Node) -> list[_Node]:
        found = []
        seen = 0
        while (outer := self.nodes.get(node.parent)) is not None and outer is not node and seen < 1000:
            found.append(outer)
            node, seen = outer, seen + 1
        return found

    def _whose(self, node: _Node) -> str:
        """Autograd's engine adds up gradients, and differentiates torch's own operations by formulas."""
        for outer in self._around(node):
            if outer.operation is None:
                engine = outer.name.startswith(_ENGINE) or _FORMULA.search(outer.name)
                return _ENGINE if engine else ""
        return ""


@functools.lru_cache(4096)
def _text(name: bytes) -> str:
    return name.decode(errors="replace")


_composite: dict[str, bool] = {}


def _is_work(node: _Node) -> bool:
    """An operation that does something itself, where a composite one only calls others."""
    name = node.operation
    if name is None or not name.startswith(("aten::", "prims::")):
        return name is not None and not name.startswith("profiler::")
    if name not in _composite:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        _composite[name] = has(name, "CompositeImplicitAutograd")
    return not _composite[name]


def apart(work: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Record]:
    """What `work` returns, done in a fork of this process. Raises Unusable("candidate_raised") where that
    ended without an answer."""
    nonce = f"kernel_agent-{os.urandom(8).hex()}"
    answer, record = os.pipe(), os.pipe()
    with contextlib.suppress(OSError):  # a user may have used up what all pipes may hold
        fcntl.fcntl(record[1], fcntl.F_SETPIPE_SZ, _PIPE)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        os.close(answer[0])
        os.close(record[0])
        _work(work, nonce, answer[1], record[1])
    os.close(answer[1])
    os.close(record[1])
    read, found = _read(answer[0], record[0], Record(nonce))
    _, status = os.waitpid(pid, 0)
    try:
        result = json.loads(read)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        raise Unusable("candidate_raised", f"the candidate's process {_ended(status)} without a result")
    return result, found


def _ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"was ended by signal {number} ({signal.strsignal(number)})"
    return f"ended with code {os.waitstatus_to_exitcode(status)}"


def _work(work: Callable[[], dict[str, Any]], nonce: str, answer: int, record: int) -> None:
    """Never returns."""
    global _nonce
    code = 1
    try:
        observer = torch._C._profiler
        with _silent():
            if observer._add_execution_trace_observer(f"/proc/self/fd/{record}"):
                _nonce = nonce
        os.close(record)
        result = work()
        if _observing:
            _observe(False)
        with _silent():
            if _nonce is not None:
                observer._remove_execution_trace_observer()
        with os.fdopen(answer, "wb") as file:
            file.write(json.dumps(result, allow_nan=False, default=str).encode())
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """torch says on standard error that it begins and ends to observe: no words of the candidate's."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _read(answer: int, record: int, found: Record) -> tuple[bytes, Record]:
    """Both pipes to their ends; of an answer that is too long, the beginning."""
    text = bytearray()
    waiting = [answer, record]
    while waiting:
        for fd in select.select(waiting, [], [])[0]:
            data = os.read(fd, 1 << 18)
            if not data:
                waiting.remove(fd)
                os.close(fd)
            elif fd == record:
                found.feed(data)
            elif len(text) < _ANSWER_MAX:
                text += data
    return bytes(text), found

"""What can be wrong with a user's file, as data: kind, sentence, place and remedy.

Every operation in the jail reports failures as `Unusable`; child.py turns them into the `error` object of
docs/protocol.md. Nothing here knows how files are loaded or run.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

KINDS = frozenset((
    "syntax", "import", "no_stub", "two_stubs", "stub_args", "sweep_missing", "sweep_type", "sweep_empty",
    "make_args_missing", "make_args_raised", "make_args_type", "stub_raised", "needs_gpu", "unsupported_op",
    "forward_oracle_mismatch", "gradient_nan", "inputs_refused", "no_outputs", "too_large", "candidate_raised",
    "candidate_shape", "timeout", "internal",
))  # fmt: skip

# How torch and Triton say that there is no GPU; any of these from a user's line is `needs_gpu`.
_NO_GPU = (
    "Found no NVIDIA driver",
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Cannot access accelerator device when none is available",
    "0 active drivers",
    "Cannot get CUDA generator",
    "Device type CUDA is not supported",
    "PyTorch is not linked with support for cuda devices",
)

_MESSAGE_MAX = 2000


class Unusable(Exception):
    """A finding about the user's file (or the candidate); about this package only if kind is `internal`."""

    def __init__(
        self,
        kind: str,
        message: str,
        file: str | Path | None = None,
        line: int | None = None,
        column: int | None = None,
        remedy: str | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown error kind {kind!r}")
        super().__init__(message)
        self.kind = kind
        self.message = message[:_MESSAGE_MAX]
        self.file = None if file is None else str(file)
        self.line = line
        self.column = column
        self.remedy = remedy
        self.traceback: str | None = None
        self.out_of_memory = False  # of the device: the daemon may try again, alone
        self.not_run = False  # a case before it left the GPU unusable: the daemon asks another child
        self.out_of_resources = False  # of a multiprocessor: no launch of this kernel fits

    def to_dict(self) -> dict[str, object]:
        """The `error` object of docs/protocol.md."""
        return {
            "kind": self.kind,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "remedy": self.remedy,
            "traceback": self.traceback,
            **({"out_of_memory": True} if self.out_of_memory else {}),
            **({"not_run": True} if self.not_run else {}),
            **({"out_of_resources": True} if self.out_of_resources else {}),
        }


def user_frames(tb: TracebackType | None, files: Iterable[str | Path]) -> list[traceback.FrameSummary]:
    """Frames of `tb` that lie in one of `files`, outermost first."""
    names = {str(f) for f in files}
    return [frame for frame in traceback.extract_tb(tb) if frame.filename in names]


def filtered_traceback(exc: BaseException, files: Iterable[str | Path]) -> str:
    """Frames of the user's files only, followed by the exception itself."""
    lines = traceback.format_list(user_frames(exc.__traceback__, files))
    return "".join(lines + traceback.format_exception_only(exc))[-8000:]


def describe(exc: BaseException) -> str:
    """`ValueError: text` on one line."""
    text = " ".join(str(exc).split())
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def wrap(
    kind: str, prefix: str, exc: BaseException, files: Iterable[str | Path], remedy: str | None = None
) -> Unusable:
    """Turn any exception out of a user's code into an `Unusable` that names the user's line.

    An `Unusable` keeps its kind and gains place and traceback where it had none; a complaint of torch or
    Triton about a missing GPU becomes `needs_gpu`.
    """
    names = [str(file) for file in files]
    frames = user_frames(exc.__traceback__, names)
    place = frames[-1].filename if frames else next(iter(names), None)
    line = frames[-1].lineno if frames else None
    if isinstance(exc, Unusable):
        error = exc
        if error.line is None and frames:
            error.file, error.line = place, line
    elif any(mark in str(exc) for mark in _NO_GPU):
        error = Unusable(
            "needs_gpu",
            f"this line needs a GPU: {describe(exc)}",
            place,
            line,
            remedy="run on a machine with a GPU, or take the device from an argument",
        )
    else:
        error = Unusable(kind, f"{prefix}{describe(exc)}", place, line, remedy=remedy)
    if error.traceback is None:
        error.traceback = filtered_traceback(exc, names)
    return error


def readable(count: int, unit: str = "bytes", digits: int = 1) -> str:
    """`12.3 GiB`, and `12 bytes` with no fraction."""
    size, larger = float(count), ""
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, larger = size / 1024, name
    return f"{size:.{digits}f} {larger}" if larger else f"{count} {unit}"

"""Commands with a limit: each in a session of its own, which is ended as a whole when its time is over."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

OUTPUT_MAX = 32 << 20
_LOOK_SECONDS = 0.1  # between looks for another line
_running: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()  # held until what is started is among those that run
_closed = False


def argv(command: Iterable[object]) -> list[str]:
    return [str(part) for part in command]


def share(jobs: int) -> list[str]:
    """Options for one of `jobs` programs at a time: its share of the machine's places for children."""
    return ["--children", str(max(2, (os.cpu_count() or 1) // jobs + 1))] if jobs > 1 else []


def machine() -> dict[str, Any]:
    """What results were made on."""
    return {"cores": os.cpu_count(), "kernel": os.uname().release, "python": platform.python_version()}


def load() -> float:
    """How many processes want a core: beside two cores, times at a load of 18 are noise."""
    return round(os.getloadavg()[0], 1)


def smi(query: str) -> list[str] | None:
    """The lines that nvidia-smi answers a query with; None where nobody can say."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = run(["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"], 20)
    return [line.strip() for line in asked.out.splitlines()] if asked.code == 0 else None


class Cards:
    """The GPUs over which programs of a `device` are spread, at most `most` on each at a time. Where there
    are not several the one place is for whatever GPU a program finds."""

    def __init__(self, device: str = "cuda", most: float = math.inf) -> None:
        names = _cards() if device == "cuda" else []
        self._users = {("--gpus", name): 0 for name in names} if len(names) > 1 else {(): 0}
        self._most, self._changed = most, threading.Condition()

    @contextlib.contextmanager
    def one(self) -> Iterator[list[str]]:
        """Options for a program: the card that fewest have, as soon as there is a place."""
        users = self._users
        with self._changed:
            self._changed.wait_for(lambda: min(users.values()) < self._most)
            card = min(users, key=lambda card: users[card])
            users[card] += 1
        try:
            yield list(card)
        finally:
            with self._changed:
                users[card] -= 1
                self._changed.notify()


def _cards() -> list[str]:
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (smi("gpu=index") or []) if asked is None else asked.replace(" ", "").split(",")


def write_json(path: Path, result: object) -> None:
    """Results as they grow: the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


@dataclass
class Ended:
    """What became of a command. `code` is None where it was ended at its limit; output is what came."""

    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def why(self) -> str:
        """How it ended, in words."""
        if self.code is None:
            return f"ran past its {self.seconds:.0f} s"
        return f"ended by signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


def run(
    command: Iterable[object], limit: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ended:
    """Runs a command for at most `limit` seconds. Output goes to files: nobody waits for a pipe that a
    grandchild holds."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code: int | None = None
        with (
            _while_it_runs(command, out, err, env, cwd) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            if process is None:
                return Ended(None, "", "", 0.0)
            code = process.wait(max(0.0, limit))
        return Ended(code, _text(out), _text(err), time.monotonic() - started)


def follow(command: Iterable[object], limit: float, told: Callable[[str, float], bool]) -> Ended:
    """Like run(), but `limit` is the longest time to a line of output, from the one before on, and `told` has
    each as it comes, with its seconds. Where it returns False the command is ended. The result has no
    output, and the seconds since the last line."""
    last = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code: int | None = None
        more, at = True, 0
        with _while_it_runs(command, out, err) as process:
            if process is None:
                return Ended(None, "", "", 0.0)
            while more and code is None and time.monotonic() - last < limit:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_SECONDS)
                for line in _lines_from(out, at):
                    at += len(line)
                    now = time.monotonic()
                    more = more and told(line.decode(errors="replace"), now - last)
                    last = now
        return Ended(code, "", _text(err), time.monotonic() - last)


@contextlib.contextmanager
def _while_it_runs(
    command: Iterable[object],
    out: IO[bytes],
    err: IO[bytes],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes] | None]:
    """A command that has ended when this is left, however it is left. None: nothing is started any more."""
    with _starting:
        process = None if _closed else start(command, out, err, env, cwd)
        if process is not None:
            _running.add(process)
    try:
        yield process
    finally:
        if process is not None:
            end(process)
            _running.discard(process)


def end_all() -> None:
    """Ends what run() runs at this moment, in whatever thread; it starts nothing from here on."""
    global _closed
    with _starting:
        _closed = True
        running = tuple(_running)
    for process in running:
        end(process)


def closed() -> bool:
    """Whether end_all() was called: what ends now did not end by itself."""
    return _closed


def start(
    command: Iterable[object],
    out: IO[bytes] | int = subprocess.DEVNULL,
    err: IO[bytes] | int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """A command in a session of its own."""
    return subprocess.Popen(
        argv(command),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=None if env is None else dict(env),
        cwd=cwd,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command of start() and its session: the polite signal first, two seconds later the final one.
    Returns once none of them runs: what a signal was sent to may take a while to die of it."""
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            _signal(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    patience = time.monotonic() + 10.0
    # what the leader left behind
    while _signal(process.pid, signal.SIGKILL) and time.monotonic() < patience:
        time.sleep(0.01)


def _signal(group: int, number: int) -> bool:
    """Whether there was a process to send it to."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _lines_from(file: IO[bytes], at: int) -> list[bytes]:
    """Whole ones. The place where the command writes is left alone."""
    found = os.pread(file.fileno(), OUTPUT_MAX, at)
    return found[: found.rfind(b"\n") + 1].splitlines(keepends=True)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT_MAX).decode(errors="replace")

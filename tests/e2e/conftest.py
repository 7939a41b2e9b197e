"""End-to-end tests: the built program, real HTTP on loopback, real children in the jail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KA_BUILD", ROOT / "build")).resolve()
PROGRAM = BUILD / "kernel-agent"
PYTHON = ROOT / ".venv" / "bin" / "python"
SERVER = ROOT / "tests" / "llm" / "server.py"


@dataclass
class Ended:
    """What one call of the program left: exit code, the result object on stdout (if any), stderr."""

    code: int
    out: str
    err: str
    result: dict[str, Any] = field(default_factory=dict)


class Agent:
    """Runs kernel-agent in a folder of its own, with nothing of the caller's configuration. Its Python is
    named: to ask every one on the PATH takes a tenth of a second, and test_python.py looks at that."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("KA_", "OPENAI_", "XDG_"))},
            "HOME": str(folder),
            "KA_SHARE": str(ROOT),
            "KA_STORE": str(BUILD / "pairs.db"),
            "KA_PYTHON": str(PYTHON),
            "ASAN_OPTIONS": "detect_leaks=1",
        }

    def command(self, *args: str | Path) -> list[str]:
        return [str(PROGRAM), *(str(arg) for arg in args)]

    def __call__(self, *args: str | Path, env: dict[str, str] | None = None) -> Ended:
        done = subprocess.run(
            self.command(*args),
            cwd=self.folder,
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        return ended(done.returncode, done.stdout, done.stderr)

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(*args),
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self.started.append(process)
        return process

    def run_dirs(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("generated/*/run.db"))


def copied_share(folder: Path) -> Path:
    """What the program needs of its installation, to be changed; bytecode too, which is right for all that is
    not."""
    for name in ("sandbox", "prompts"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


# Where the oracle begins with a case: what stands before it happens in each.
CASE = "        recording = self.record(self.dtype)\n        self.require_taken(recording)\n"


def change_operation(share: Path, name: str, before: str, after: str) -> Path:
    """A file of operations in such a copy, with one place in it another."""
    file = share / "sandbox" / "kernel_agent" / "operations" / name
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    return file


# Of these a test is one run or several of the whole program, most of them on the same few kernels, and none
# looks at how they come to be compiled (test_compile_cache.py does).
ONE_CACHE = {
    f"test_{name}.py"
    for name in (
        "batch", "candidates", "card_room", "card_turns", "check", "check_sanitize", "closer_look", "handwritten",
        "lessons", "model", "modules", "overlap", "prompt_command", "race", "resume", "retry", "second_draft",
        "square_shapes", "transcripts", "turns",
    )
}  # fmt: skip


@contextlib.contextmanager
def compiled_once(pool: Path, agent: Agent) -> Iterator[None]:
    """What was compiled in the session before is in the agent's cache, and what it compiles in the pool."""
    cache = agent.folder / ".cache" / "kernel-agent" / "compiled"
    link_entries(pool, cache)
    yield
    link_entries(cache, pool)


def link_entries(source: Path, target: Path) -> None:
    """Whole entries alone: one that is being written has another name."""
    for entry in source.glob("*/*.json"):
        there = target / entry.relative_to(source)
        there.parent.mkdir(0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            there.hardlink_to(entry)


def ended(code: int, out: str, err: str) -> Ended:
    text = out.strip()
    return Ended(code, out, err, json.loads(text) if text.startswith("{") else {})


@pytest.fixture
def agent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Agent]:
    """Whatever a test that fails has left running ends with it."""
    one = Agent(tmp_path)
    base = tmp_path_factory.getbasetemp()
    pool = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    with compiled_once(pool, one) if request.path.name in ONE_CACHE else contextlib.nullcontext():
        yield one
    for process in one.started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@dataclass
class Endpoint:
    """A scripted model: its URL for --base-url, and what it was sent."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/state") as reply:
            said: dict[str, Any] = json.load(reply)
        return said

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def start_endpoint(folder: Path, steps: list[dict[str, Any]], *options: str, number: int = 0) -> Endpoint:
    """A server that answers with these steps, in order. The caller stops it."""
    script, port, log = (folder / f"llm-{number}.{kind}" for kind in ("jsonl", "port", "log"))
    script.write_text("".join(json.dumps(step) + "\n" for step in steps))
    command = [
        sys.executable,
        SERVER,
        "--script",
        script,
        "--port-file",
        port,
        "--log",
        log,
        "--seconds",
        "900",
    ]
    process = subprocess.Popen([*map(str, command), *options], stdout=subprocess.DEVNULL)
    while not (port.exists() and port.read_text().strip()):
        assert process.poll() is None, "the scripted endpoint did not start"
        time.sleep(0.02)
    return Endpoint(f"http://127.0.0.1:{port.read_text().strip()}/v1", log, process)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Callable[..., Endpoint]]:
    """endpoint(steps, *options) starts a server that answers with these steps, in order."""
    started: list[Endpoint] = []

    def start(steps: list[dict[str, Any]], *options: str) -> Endpoint:
        started.append(start_endpoint(tmp_path, steps, *options, number=len(started)))
        return started[-1]

    yield start
    for one in started:
        one.stop()

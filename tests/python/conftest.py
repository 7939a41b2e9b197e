"""Shared by all Python tests: the package on sys.path, forward files written on the fly, operations as child
processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sources import SANDBOX

sys.path.insert(0, str(SANDBOX))
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.set_threshold(20_000, 20, 20)  # a collection for each 700 objects finds next to nothing

from kernel_agent import launches


@pytest.fixture(autouse=True)
def garbage_of_this_test_alone() -> Iterator[None]:
    """What a test leaves is not looked through for garbage in those behind it: that takes a fifth of their
    time."""
    yield
    gc.freeze()


@pytest.fixture(autouse=True)
def launches_as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations set how their process launches for good: no test may hang on which ran before it."""
    for name, value in vars(launches._State()).items():
        monkeypatch.setattr(launches._state, name, value)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(source, name="file.py") puts a file into a folder of its own."""

    def make(source: str, name: str = "file.py") -> Path:
        path = tmp_path / name
        path.write_text(source)
        return path

    return make


@dataclass
class Ran:
    """What one child process left behind."""

    code: int
    result: dict[str, Any]
    scratch: Path
    output: str


@pytest.fixture
def run_op(tmp_path: Path) -> Callable[..., Ran]:
    """run_op("inspect", path, **fields) runs one operation as the daemon does: in a process of its own."""
    count = 0

    def run(op: str, file: Path, **fields: Any) -> Ran:
        nonlocal count
        count += 1
        scratch = tmp_path / f"scratch-{count}"
        scratch.mkdir()
        request = {"op": op, "nonce": f"{count:08x}", "file": str(file), "device": "cpu", "target": "sm_90"}
        request |= {"dtype": None, **fields}
        (scratch / "request.json").write_text(json.dumps(request))
        environment = {**os.environ, "PYTHONPATH": str(SANDBOX), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "kernel_agent.child", str(scratch)],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        path = scratch / "result.json"
        result = json.loads(path.read_text()) if path.exists() else {}
        return Ran(done.returncode, result, scratch, done.stdout + done.stderr)

    return run

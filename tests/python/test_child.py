"""The entry of a child: errors of the machine rather than of the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from kernel_agent import child
from sources import SANDBOX, SCALE, SCALE_PAIR


@pytest.mark.parametrize("name", ["torch", "triton", "numpy"])
def test_python_without_a_needed_module__is_told_so_with_the_remedy(name):
    error = child._error(ModuleNotFoundError(f"No module named {name!r}", name=name), {"op": "inspect"})
    assert error.message == f"{sys.executable} has no module {name}"
    assert "--python" in error.remedy and error.traceback in (None, "")


def test_module_that_the_users_file_wants__is_another_error():
    error = child._error(ModuleNotFoundError("No module named 'einops'", name="einops"), {"op": "inspect"})
    assert "has no module" not in error.message


# Stands in for a native library that is torn down with a thread at work.
ABORTS = "\nimport atexit, os\natexit.register(os.abort)\nprint('what the file prints')\n"


def test_process__with_its_result_written__runs_nothing_at_its_end(run_op, write):
    ran = run_op("inspect", write(SCALE + ABORTS))
    assert (ran.code, ran.result["ok"]) == (0, True)
    assert "what the file prints" in ran.output


def test_process_below_compute_sanitizer__ends_in_order(run_op, write):
    """The tool reports as the process ends."""
    ran = run_op("candidate", write(SCALE_PAIR + ABORTS), plain=True, cases=[])
    assert ran.code == -signal.SIGABRT and ran.result["ok"]


def test_result_that_cannot_be_written__is_exit_code_1(tmp_path):
    (tmp_path / "request.json").write_text('{"op": "sideways"}')
    (tmp_path / "result.json").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(SANDBOX)}
    command = [sys.executable, "-m", "kernel_agent.child", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "could not be written" in done.stderr


@pytest.mark.parametrize(("op", "device"), [("oracle", "cuda"), ("oracle", "cpu"), ("candidate", "cuda")])
def test_oracle_on_a_gpu__tells_what_its_context_took(op, device, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: opened.append(op))
    monkeypatch.setattr(child, "_operation", lambda request: lambda request, scratch: {})
    result = child._run({"op": op, "device": device}, tmp_path)
    asked = (op, device) == ("oracle", "cuda")
    assert ("context_seconds" in result, bool(opened)) == (asked, asked)

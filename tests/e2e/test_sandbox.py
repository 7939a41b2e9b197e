"""`--require-sandbox` and `doctor`: what people are told about layers, Python and the cache."""

from __future__ import annotations

import pytest
from conftest import BUILD, ROOT, Agent

FORWARD = ROOT / "examples" / "softmax.py"
PYTHON = ROOT / ".venv" / "bin" / "python"


@pytest.fixture
def without_cgroup(agent: Agent) -> dict[str, str]:
    """A jail that cannot make a control group, as on most machines without root."""
    jail = agent.folder / "ka-jail"
    jail.write_text(f'#!/bin/sh\nexec {BUILD / "ka-jail"} --without cgroup "$@"\n')
    jail.chmod(0o755)
    return {"KA_JAIL": str(jail)}


@pytest.mark.parametrize("words", ["bogus", "landlock+bogus", "landlock+", "full landlock", ""])
def test_require_sandbox__word_that_is_no_layer__is_a_usage_error_before_anything_runs(
    agent: Agent, words: str
):
    done = agent("inspect", FORWARD, f"--require-sandbox={words}", "--python", PYTHON)
    assert done.code == 2 and "--require-sandbox" in done.err and "landlock seccomp" in done.err


def test_require_sandbox__layer_that_is_missing__is_named_with_the_reason(agent: Agent, without_cgroup):
    done = agent("inspect", FORWARD, "--require-sandbox", "all", "--python", PYTHON, env=without_cgroup)
    assert done.code == 6
    assert "cgroup (not asked for)" in done.err and "kernel-agent doctor" in done.err


def test_doctor__cache_of_compiled_kernels__is_named_and_measured(agent: Agent):
    folder = agent.folder / "cache" / "kernel-agent" / "compiled" / "abc"
    folder.mkdir(parents=True)
    (folder / ("0" * 64 + ".json")).write_text("x" * 1000)
    (folder / "leftover").write_text("x" * 24)
    env = {"XDG_CACHE_HOME": str(agent.folder / "cache")}
    found = agent("doctor", "--json", "--python", PYTHON, env=env).result["cache"]
    assert found == {"folder": str(folder.parent), "entries": 1, "bytes": 1024}


def test_doctor__own_python_that_this_user_cannot_run__is_said(agent: Agent):
    share = agent.folder / "share"
    (share / "sandbox" / "kernel_agent").mkdir(parents=True)
    (share / ".venv" / "bin").mkdir(parents=True)
    own = share / ".venv" / "bin" / "python"
    own.symlink_to("/nowhere/python")
    del agent.env["KA_PYTHON"]
    done = agent("doctor", env={"KA_SHARE": str(share)})
    assert f"{own} (the .venv of this installation): this user cannot run it" in done.out

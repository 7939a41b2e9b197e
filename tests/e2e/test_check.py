"""`check` of several pairs: a line of JSON each, in their order, and the worst exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, Agent

sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import suite

WRONG = ("tl.atomic_add(ds_ptr, tl.sum(dy * x))", "tl.atomic_add(ds_ptr, 2 * tl.sum(dy * x))")


def test_check__right_and_wrong_pair__gives_both_verdicts_and_exit_code_4(agent: Agent):
    right = suite.control("scale_atomics")
    files: list[Path] = []
    for name, backward in (("wrong.py", right.replace(*WRONG)), ("right.py", right)):
        files.append(agent.folder / name)
        files[-1].write_text(suite.pair("scale_atomics", backward))
    command = agent.command("check", *files, "--json", "--quiet")
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 4
    assert [result["verdict"] for result in results] == ["not_verified", "verified"]
    assert "accumulated twice" in results[0]["failures"]


def test_verify__several_words__is_a_usage_error(agent: Agent):
    done = agent("verify", "one", "two")
    assert done.code == 2

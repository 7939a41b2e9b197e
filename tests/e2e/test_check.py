"""`check` of several pairs: a line of JSON each, in their order, and the worst exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def checked(agent: Agent, backwards: dict[str, str], *options: str) -> tuple[list[dict[str, Any]], str]:
    """Results and log of one `check` of pairs of one forward."""
    files = []
    for name, backward in backwards.items():
        files.append(agent.folder / name)
        files[-1].write_text(suite.pair("scale_atomics", backward))
    command = agent.command("check", *files, "--json", "--log-level", "debug", *options)
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_check__fail_fast__stops_a_wrong_pair_and_judges_a_right_one_in_full(agent: Agent):
    right = suite.control("scale_atomics")
    early = right.replace(*WRONG)
    # wrong only for a strided upstream, which is one of the last cases
    late = right.replace("x.contiguous(), dy.contiguous()", "x.contiguous(), dy")
    assert early != right != late
    pairs = {"early.py": early, "late.py": late, "right.py": right}
    results, log = checked(agent, pairs, "--fail-fast")
    assert [result["verdict"] for result in results] == ["not_verified", "not_verified", "verified"]
    unreached = {skipped["reason"] for skipped in results[0]["shapes"]["skipped"]}
    assert unreached == {"not reached: --fail-fast"} and "accumulated twice" in results[0]["failures"]
    assert "strides" in results[1]["failures"] and results[1]["shapes"]["hidden_passed"] > 0
    shapes = results[2]["shapes"]
    assert shapes["passed"] == shapes["required"] and shapes["hidden_passed"] == shapes["hidden"] > 0
    assert not shapes["skipped"] and not results[2].get("measured")
    assert log.count("inspect -> preflight") == 3 and log.count("preflight: forward against oracle") == 1


def test_check__pairs_of_different_forwards__are_each_looked_at(agent: Agent):
    files = []
    for name in ("scale_atomics", "softmax_saved_output"):
        files.append(agent.folder / f"{name}.py")
        files[-1].write_text(suite.pair(name, suite.control(name)))
    command = agent.command("check", *files, "--json", "--fail-fast")
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(r["verdict"], r["stub"]) for r in results] == [("verified", "scale"), ("verified", "softmax")]
    assert done.stderr.count("preflight: forward against oracle") == 2


def test_verify__several_words__is_a_usage_error(agent: Agent):
    done = agent("verify", "one", "two")
    assert done.code == 2

"""`check` of several pairs: a line of JSON each, in their order, and the worst exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from conftest import ROOT, Agent

sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import suite

WRONG = ("tl.atomic_add(ds_ptr, tl.sum(dy * x))", "tl.atomic_add(ds_ptr, 2 * tl.sum(dy * x))")


def checked(agent: Agent, backwards: dict[str, str], *options: str) -> tuple[list[dict[str, Any]], str]:
    """Results and log of one `check` of pairs of one forward, not all of which are right."""
    files = []
    for name, backward in backwards.items():
        files.append(agent.folder / name)
        files[-1].write_text(suite.pair("scale_atomics", backward))
    command = agent.command("check", *files, "--json", "--log-level", "debug", *options)
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.fixture
def not_compiled() -> str:
    """The interpreter runs `continue`; Triton does not compile it."""
    added = "tl.atomic_add(ds_ptr, tl.sum(dy * x))"
    loop = f"for step in range(2):\n        if step == 1:\n            continue\n        {added}"
    return suite.control("scale_atomics").replace(added, loop)


def assert_not_compiled(result: dict[str, Any]) -> None:
    assert (result["verdict"], result["exit_code"]) == ("not_verified", 4)
    failures = result["failures"]
    assert re.search(r"line \d+, `continue`: \w+ does not compile: .*unsupported AST", failures), failures
    assert failures.count("does not compile:") == 1 and "sm_90" in failures


def test_check__kernel_that_the_target_does_not_compile__is_not_verified(agent: Agent, not_compiled: str):
    pairs = {"pair.py": not_compiled, "right.py": suite.control("scale_atomics")}
    (wrong, right), _ = checked(agent, pairs)
    assert_not_compiled(wrong)
    assert (right["verdict"], right["exit_code"]) == ("verified", 0)
    told = right["checked"]
    assert {"normal upstream", "onehot upstream"} <= {kind["name"] for kind in told["kinds"]}
    assert any(item["name"] == "none_one upstream" for item in told["left_out"])
    assert any("one after another" in text for text in told["not_seen"])
    assert not any("compile for" in text for text in told["not_seen"]), "they were compiled here"


def test_check__kernel_that_the_target_does_not_compile__is_what_fails_fast(agent: Agent, not_compiled: str):
    (agent.folder / "pair.py").write_text(suite.pair("scale_atomics", not_compiled))
    done = agent("check", "pair.py", "--json", "--fail-fast")
    assert done.code == 4, done.err
    assert_not_compiled(done.result)


def test_check__fail_fast__stops_a_wrong_pair_and_judges_a_right_one_in_full(agent: Agent):
    right = suite.control("scale_atomics")
    early = right.replace(*WRONG)
    # wrong only for an upstream with strides, which is one of the last cases
    late = right.replace("x.contiguous(), dy.contiguous()", "x.contiguous(), dy")
    assert early != right != late
    pairs = {"early.py": early, "late.py": late, "right.py": right}
    results, log = checked(agent, pairs, "--fail-fast")
    assert [result["verdict"] for result in results] == ["not_verified", "not_verified", "verified"]
    unreached = {skipped["reason"] for skipped in results[0]["shapes"]["skipped"]}
    assert unreached == {"not reached: --fail-fast"} and "accumulated twice" in results[0]["failures"]
    assert "fails only with stacked upstream" in results[1]["failures"]
    assert results[1]["shapes"]["hidden_passed"] > 0
    shapes = results[2]["shapes"]
    assert shapes["passed"] == shapes["required"] and shapes["hidden_passed"] == shapes["hidden"] > 0
    assert not shapes["skipped"] and results[2].get("measured")
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


def test_junit__several_files__has_a_suite_for_each_with_failures_and_errors_told_apart(agent: Agent):
    right = suite.control("scale_atomics")
    for name, text in (
        ("wrong.py", suite.pair("scale_atomics", right.replace(*WRONG))),
        ("unusable.py", suite.pair("scale_atomics", right).replace("SWEEP =", "SHAPES =")),
        ("right.py", suite.pair("scale_atomics", right)),
    ):
        (agent.folder / name).write_text(text)
    command = agent.command("check", "wrong.py", "unusable.py", "missing.py", "right.py", "--json", "--quiet")
    done = subprocess.run(
        [*command, "--junit", "out.xml"],
        cwd=agent.folder,
        env=agent.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["exit_code"] for result in results] == [4, 3, 0]  # the missing one has none
    assert "accumulated twice" in results[0]["failures"]
    root = ET.parse(agent.folder / "out.xml").getroot()
    assert root.tag == "testsuites"
    counts = {one.get("name"): tuple(one.get(key) for key in ("tests", "failures", "errors")) for one in root}
    assert counts == {
        "wrong.py": ("3", "2", "0"),
        "unusable.py": ("1", "0", "1"),
        "missing.py": ("1", "0", "1"),
        "right.py": ("3", "0", "0"),
    }
    wrong = root.find("testsuite[@name='wrong.py']")
    assert wrong is not None
    failed = [case.get("name") for case in wrong if case.find("failure") is not None]
    assert failed == ["verdict", "gradient of s"]
    assert all(one.find("failure").get("message") for one in wrong if one.find("failure") is not None)


def test_check__gradient_that_is_zero_on_a_shape__is_no_decoy_there(agent: Agent):
    """Softmax over one column: with buffers of zeros, kernels that do nothing leave the same."""
    backward = suite.control("softmax_saved_output").replace("torch.empty_like(", "torch.zeros_like(")
    pair = suite.pair("softmax_saved_output", backward)
    assert pair.count("zeros_like(") == 1
    file = agent.folder / "one_column.py"
    file.write_text(pair.replace('[{"M": 3, "N": 20}]', '[{"M": 3, "N": 1}, {"M": 3, "N": 20}]'))
    done = agent("check", file, "--json", "--quiet")
    assert done.result["verdict"] == "verified", done.result["failures"]


def test_check__line_that_cannot_be_accepted__is_quoted(agent: Agent):
    head = "def backward(ctx, dy):"
    right = suite.control("softmax_saved_output")
    assert right.count(head) == 1
    for name, text in (("syntax", head[:-1]), ("forbidden", f"{head}\n        open('x')")):
        (agent.folder / f"{name}.py").write_text(
            suite.pair("softmax_saved_output", right.replace(head, text))
        )
    command = agent.command("check", "syntax.py", "forbidden.py", "--json", "--quiet")
    done = subprocess.run(
        command, cwd=agent.folder, env=agent.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    syntax, forbidden = (json.loads(line)["failures"] for line in done.stdout.splitlines())
    told = r"syntax: line \d+, `def backward\(ctx, dy\)`: SyntaxError: expected ':'"
    assert re.search(told, syntax), syntax
    assert re.search(r"forbidden: line \d+, `open\('x'\)`: uses open", forbidden), forbidden


def test_check__kernel_that_no_case_launches__is_named(agent: Agent):
    text = (ROOT / "dataset/activation_glu/gelu_erf_recompute.py").read_text()
    launch = "gelu_backward_kernel[(triton.cdiv(x.numel(), 1024),)](x, dy, dx, x.numel(), BLOCK=1024)"
    start, end = text.index("@triton.jit\ndef gelu_backward_kernel"), text.index("class Gelu(")
    other = text[start:end].replace("gelu_backward_kernel", "gelu_long_kernel")
    long = launch.replace("backward", "long")
    chosen = f"if x.numel() > 1 << 40:\n            {long}\n        else:\n            {launch}"
    (agent.folder / "gelu.py").write_text(text[:end] + other + text[end:].replace(launch, chosen))
    done = agent("check", "gelu.py", "--json")
    assert (done.code, done.result["verdict"]) == (0, "verified"), done.result.get("failures", done.err)
    (remark,) = done.result["checked"]["remarks"]
    assert "no case launched gelu_long_kernel" in remark

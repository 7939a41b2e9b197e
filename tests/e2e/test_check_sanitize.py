"""`check --sanitize`: what is missing is said, and what a sanitizer reports becomes the verdict. The tool
here is a script; no GPU is involved, and nothing is shown about one."""

from __future__ import annotations

import sys

from conftest import ROOT, Agent, Ended

sys.path.insert(0, str(ROOT / "tests" / "attacks"))
import suite

# Prints the head and the summary of a report around the watched program; {finding} only for the {tools}.
SCRIPT = """#!/bin/sh
tool=$2
while [ "$2" != -m ]; do shift; done
echo "========= COMPUTE-SANITIZER"
"$@"
case $tool in
{tools}) cat <<'END'
{finding}
END
;;
*) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
WRITE = """========= Invalid __global__ write of size 4 bytes
=========     at scale_backward_kernel+0x1f0 in {pair}:52
=========     by thread (31,0,0) in block (1,0,0)
=========     Access to 0x7f3e3a200280 is out of bounds
=========
========= ERROR SUMMARY: 1 error"""

REDUNDANT = """========= Error: Race reported between Write access at scale_backward_kernel+0xa0 in {pair}:52
=========     and Write access at scale_backward_kernel+0xa0 in {pair}:52 [84 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""


def check(agent: Agent, script: str | None, *options: str, anywhere: bool = True) -> Ended:
    pair = agent.folder / "pair.py"
    pair.write_text(suite.pair("scale_atomics", suite.control("scale_atomics")))
    tools = agent.folder / "tools"
    tools.mkdir()
    if script is not None:
        tool = tools / "compute-sanitizer"
        tool.write_text(script.replace("{pair}", str(pair)))
        tool.chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin"} | ({"KA_SANITIZE_ANYWHERE": "1"} if anywhere else {})
    return agent("check", pair, "--sanitize", "--json", *options, env=env)


def test_without_a_gpu_it_is_a_usage_error(agent: Agent) -> None:
    done = check(agent, SCRIPT, "--device", "cpu", anywhere=False)
    assert done.code == 2
    assert "--sanitize" in done.err and "GPU" in done.err and "--device cuda" in done.err


def test_without_the_tool_it_is_a_usage_error(agent: Agent) -> None:
    done = check(agent, None)
    assert done.code == 2
    assert "no compute-sanitizer on PATH" in done.err and "CUDA toolkit" in done.err


def test_findings_are_attributed_and_make_the_verdict_not_verified(agent: Agent) -> None:
    done = check(agent, SCRIPT.format(tools="memcheck|racecheck", finding=WRITE))
    assert done.code == 4, done.err
    assert done.result["verdict"] == "not_verified"
    for tool in ("memcheck", "racecheck"):
        said = done.result["failures"].partition(f"{tool}: Invalid __global__ write of size 4 bytes")
        assert "scale_backward_kernel" in said[2] and "pair.py line 52" in said[2], done.result["failures"]
    assert "initcheck" not in done.result["failures"]


def test_stores_that_race_with_themselves_are_told_and_leave_the_verdict(agent: Agent) -> None:
    done = check(agent, SCRIPT.format(tools="racecheck", finding=REDUNDANT))
    assert (done.code, done.result["verdict"]) == (0, "verified"), done.err
    (race,) = done.result["sanitizer"][1]["redundant"]
    assert (race["kernel"], race["line"]) == ("scale_backward_kernel", 52)
    assert "racecheck: in scale_backward_kernel, line 52, lanes that hold one reduced value" in done.err


def test_clean_reports_leave_the_verdict(agent: Agent) -> None:
    done = check(agent, SCRIPT.format(tools="none", finding=""))
    assert (done.code, done.result["verdict"]) == (0, "verified"), done.err
    assert [run["tool"] for run in done.result["sanitizer"]] == ["memcheck", "racecheck", "initcheck"]
    assert all(run["complete"] for run in done.result["sanitizer"])


def test_tool_that_reports_nothing_is_no_clean_report(agent: Agent) -> None:
    done = check(agent, "#!/bin/sh\necho 'no CUDA driver'\nexit 1\n")
    assert done.code == 4
    assert "memcheck gave no report to its end" in done.result["failures"]
    assert "no CUDA driver" in done.result["failures"]

"""Reports of compute-sanitizer: what is read from them. The texts follow the tool's documented format; no GPU
was involved."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from kernel_agent.operations import sanitize

MEMCHECK = """\
backward of the pair
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale_bwd_kernel+0x1f0 in /home/me/pair.py:52
=========     by thread (31,0,0) in block (1,0,0)
=========     Access to 0x7f3e3a200280 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3e3a200200 of size 128 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at scale_bwd_kernel+0x1f0 in /home/me/pair.py:52
=========     by thread (30,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
OLDER = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at 0x2c0 in /home/me/pair.py:61:attn_bwd
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_kernel+0x2e0 in /home/me/pair.py:33
=========     and Read access at sum_kernel+0x310 in /home/me/pair.py:34 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at add_rows_kernel+0x90 in /home/me/pair.py:71
=========     by thread (5,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\nverdict output\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("text", "what", "kernel", "line", "times"),
    [
        (MEMCHECK, "Invalid __global__ write of size 4 bytes", "scale_bwd_kernel", 52, 2),
        (OLDER, "Invalid __global__ read of size 2 bytes", "attn_bwd", 61, 1),
        (RACECHECK, "Error: Race reported between Write access", "sum_kernel", 33, 1),
        (INITCHECK, "Uninitialized __global__ memory read of size 4 bytes", "add_rows_kernel", 71, 1),
    ],
)
def test_report__finding_has_kind_kernel_and_line(text, what, kernel, line, times):
    report = sanitize.parse(text)
    assert report["complete"]
    place = {"file": "/home/me/pair.py", "kernel": kernel, "line": line}
    assert report["findings"] == [{"what": what, **place, "redundant": False, "times": times}]


def test_report__clean__has_no_finding_and_is_complete():
    assert sanitize.parse(CLEAN) == {"complete": True, "findings": [], "unseen": None}


@pytest.mark.parametrize("text", ["", "========= COMPUTE-SANITIZER\n", "ERROR SUMMARY: 0 errors"])
def test_report__without_the_tools_summary__is_not_complete(text):
    assert not sanitize.parse(text)["complete"]


def test_report__counted_but_undescribed_errors__are_a_finding():
    (finding,) = sanitize.parse("========= ERROR SUMMARY: 3 errors\n")["findings"]
    assert finding["what"] == "3 errors without a description"


def test_report__race_of_a_warning_in_capitals__is_a_finding():
    text = INITCHECK.replace(
        "Uninitialized __global__ memory read", "WARNING: Race reported between Write access"
    )
    assert sanitize.parse(text)["findings"]


def test_report__of_a_tool_that_says_it_missed_launches__tells_so():
    missed = (
        "Internal Sanitizer Error: The Sanitizer encountered an error while launching f and didn't track it."
    )
    assert sanitize.parse(f"========= {missed}\n{CLEAN}")["unseen"] == missed


def test_report__store_that_races_with_itself__is_redundant():
    itself = RACECHECK.replace("Read access at sum_kernel+0x310", "Write access at sum_kernel+0x2e0")
    assert [one["redundant"] for one in sanitize.parse(itself)["findings"]] == [True]
    another = RACECHECK.replace("Read access at", "Write access at")
    of_both = RACECHECK.replace("sum_kernel+0x310", "sum_kernel+0x2e0")
    more = itself.replace(
        "[512 hazards]", "[5 hazards]\n=========     and Read access at sum_kernel+0x2e0 in p.py:9"
    )
    for text in (RACECHECK, another, of_both, more, INITCHECK):
        assert [one["redundant"] for one in sanitize.parse(text)["findings"]] == [False]
    both = sanitize.parse(itself.replace("========= RACECHECK SUMMARY", RACECHECK + "========= X"))
    assert sorted(one["redundant"] for one in both["findings"]) == [False, True]


PAIR = """
import triton

@triton.jit
def forward_kernel(x): ...

# ---- backward ----
@triton.autotune(configs=[], key=[])
@triton.jit
def first_bwd(x): ...

@triton.jit(do_not_specialize=["n"])
def second_bwd(x, n): ...

def not_a_kernel(x): ...
"""


def test_kernels__are_those_below_the_marker():
    assert sanitize.kernels_of(PAIR) == ["first_bwd", "second_bwd"]
    assert sanitize.kernels_of(PAIR.split("# ----")[0]) == ["forward_kernel"]


def test_options__each_kernel_is_named__but_initcheck_sees_every_write():
    given = sanitize.options("memcheck", ["first_bwd", "second_bwd"])
    assert given.count("--kernel-name") == 2 and "kernel_substring=second_bwd" in given
    assert "--kernel-name" not in sanitize.options("initcheck", ["first_bwd"])


# Stands for the tool: the watched folder is its last argument. {does} is run in a shell.
TOOL = """#!/bin/sh
for folder; do :; done
tool=$2
{does}
"""
RAN = {"cases": [{"ok": True, "launches_backward": 1}]}


def watch(tmp_path: Path, does: str, ran: dict = RAN, **request):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        TOOL.format(does=does.replace("RESULT", f"echo '{json.dumps(ran)}' >$folder/result.json"))
    )
    tool.chmod(0o755)
    pair = tmp_path / "pair.py"
    pair.write_text(PAIR)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return sanitize.run({"sanitizer": str(tool), "file": str(pair), **request}, scratch)


def test_tools__run_side_by_side_and_are_complete(tmp_path):
    # each waits until all three have started
    does = "touch {0}/$tool; while [ $(ls {0} | wc -l) -lt 3 ]; do sleep 0.01; done".format(tmp_path / "at")
    (tmp_path / "at").mkdir()
    result = watch(tmp_path, does + "; RESULT; echo '========= ERROR SUMMARY: 0 errors'")
    assert [(run["tool"], run["complete"], run["reason"]) for run in result["runs"]] == [
        (tool, True, None) for tool in sanitize.TOOLS
    ]
    assert result["kernels"] == ["first_bwd", "second_bwd"]


def test_tool__past_its_limit__is_ended_with_all_it_started(tmp_path):
    does = f"if [ $tool = memcheck ]; then sleep 600 & echo $! >{tmp_path}/pid; sleep 600; fi\n"
    does += "RESULT; echo '========= ERROR SUMMARY: 0 errors'"
    (run,) = watch(tmp_path, does, tools=["memcheck"], tool_seconds=4)["runs"]
    assert (run["complete"], run["reason"]) == (False, "ran past 4 s")
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while left.exists() and left.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("ran", "reason"),
    [
        (
            {"cases": [{"ok": False, "error": {"message": "out of memory"}}]},
            "the watched run failed: out of memory",
        ),
        (
            {"cases": [{"ok": True, "launches_backward": 0}]},
            "the watched run launched no kernel in its backward",
        ),
    ],
)
def test_tool__whose_watched_run_did_not_do_its_work__is_not_complete(tmp_path, ran, reason):
    result = watch(tmp_path, "RESULT; echo '========= ERROR SUMMARY: 0 errors'", ran)
    assert {(run["complete"], run["reason"]) for run in result["runs"]} == {(False, reason)}


def test_finding__in_a_kernel_of_torch__is_not_the_candidates(tmp_path):
    report = INITCHECK.replace("add_rows_kernel", "vectorized_copy") + INITCHECK.replace(
        "add_rows_kernel", "first_bwd"
    )
    result = watch(tmp_path, f"cat <<'END'\n{report}END\nRESULT")
    for run in result["runs"]:
        assert ([one["kernel"] for one in run["findings"]], run["elsewhere"]) == (["first_bwd"], 1)

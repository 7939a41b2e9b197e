"""Reports of compute-sanitizer: what is read from them. The texts follow the tool's documented format; no GPU was involved."""

from __future__ import annotations

import pytest
from kernel_agent import sanitize

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
    assert report["findings"] == [{"what": what, **place, "times": times}]


def test_report__clean__has_no_finding_and_is_complete():
    assert sanitize.parse(CLEAN) == {"complete": True, "findings": []}


@pytest.mark.parametrize("text", ["", "========= COMPUTE-SANITIZER\n", "ERROR SUMMARY: 0 errors"])
def test_report__without_the_tools_summary__is_not_complete(text):
    assert not sanitize.parse(text)["complete"]


def test_report__counted_but_undescribed_errors__are_a_finding():
    (finding,) = sanitize.parse("========= ERROR SUMMARY: 3 errors\n")["findings"]
    assert finding["what"] == "3 errors without a description"

"""A pytest plugin: a test that fails is named at once, so that a run that is cut off has said so."""

from __future__ import annotations

import os
import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nfailed: {report.nodeid} ({report.when})", file=sys.stderr, flush=True)

"""A pytest plugin: tests that take long are listed in slow_tests.txt, a line `SECONDS NODE` each.

    --slow=leave      all but those: `make test`
    --slow=only       those alone: `make test-slow`
    --slow=list       all, and the list is written anew: `make slow-list`

Tests that are run begin with the longest, dealt to the workers in turn: one that is begun last is what all
others wait for. A name of a collected file that is no test any more is an error.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 5.0  # of set-up, test and tear-down, in a run of the whole suite; those that take more are listed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", choices=("leave", "only", "list"), help="what takes long (slow_tests.py)")


def listed() -> dict[str, float]:
    """Seconds by node."""
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    return {node: float(seconds) for seconds, _, node in (line.partition(" ") for line in lines)}


def dealt(items: list[pytest.Item], seconds: dict[str, float], workers: int) -> list[pytest.Item]:
    """The longest first, for each of `workers`, who begin with even shares of the list from front to end."""
    ordered = sorted(items, key=lambda item: -seconds.get(item.nodeid, 0.0))
    return [item for worker in range(workers) for item in ordered[worker::workers]]


@pytest.hookimpl(tryfirst=True)  # before -k and -m take away what the list names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds, wanted = listed(), config.getoption("--slow")
    if wanted in ("leave", "only"):
        names = {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in names}
        for node in seconds.keys() - names:
            if node.partition("::")[0] in files:
                raise pytest.UsageError(f"{LIST} names what is no test: {node} (make slow-list)")
        slow = [item for item in items if item.nodeid in seconds]
        others = [item for item in items if item.nodeid not in seconds]
        items[:], left = (slow, others) if wanted == "only" else (others, slow)
        config.hook.pytest_deselected(items=left)
    items[:] = dealt(items, seconds, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


class Took:
    """Seconds of each test of this run; in the process that hears of all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted((seconds, node) for node, seconds in self.seconds.items() if seconds > SECONDS)
        LIST.write_text("".join(f"{seconds:.0f} {node}\n" for seconds, node in reversed(slow)))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow") == "list" and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Took())

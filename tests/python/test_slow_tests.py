"""tests/slow_tests.py: which tests `make test` leaves to `make test-slow`, and in what order they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parents[1] / "slow_tests.py"
TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.parametrize("word", ["a b", "c"])
def test_words(word):
    pass

def test_long():
    pass
"""
TAKES = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    report.duration = 2.0 if item.name == "test_long" else 0.5
    return report
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(PLUGIN, tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "slow_tests.txt").write_text("9 test_it.py::test_long\n6 test_it.py::test_words[a b]\n")
    return tmp_path


def run(folder: Path, *options: str) -> tuple[list[str], str]:
    """The names of the tests that ran, in order, and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "slow_tests", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    passed = [line.partition(" PASSED")[0] for line in done.stdout.splitlines() if " PASSED" in line]
    return [node.removeprefix("test_it.py::") for node in passed], done.stdout + done.stderr


def test_slow_tests__are_left_out_or_run_alone_or_run_first(folder: Path) -> None:
    assert run(folder, "--slow=leave")[0] == ["test_quick", "test_words[c]"]
    assert run(folder, "--slow=only")[0] == ["test_long", "test_words[a b]"]
    assert run(folder)[0] == ["test_long", "test_words[a b]", "test_quick", "test_words[c]"]
    assert run(folder, "--slow=only", "-k", "words")[0] == ["test_words[a b]"]


def test_name_that_is_no_test_any_more__is_an_error(folder: Path) -> None:
    with (folder / "slow_tests.txt").open("a") as file:
        file.write("7 test_it.py::test_gone\n8 test_other.py::test_of_a_file_that_is_not_run\n")
    ran, said = run(folder, "--slow=leave")
    assert ran == [] and "names what is no test: test_it.py::test_gone (make slow-list)" in said


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_list__is_made_of_those_that_took_long(folder: Path, workers: tuple[str, ...]) -> None:
    """Of set-up, test and tear-down: two seconds each here, beside half a second."""
    (folder / "conftest.py").write_text(TAKES)
    _, said = run(folder, "--slow=list", *workers)
    assert "4 passed" in said
    assert (folder / "slow_tests.txt").read_text() == "6 test_it.py::test_long\n"


def test_each_worker__begins_with_the_longest_of_its_share(folder: Path) -> None:
    script = (
        "import slow_tests\n"
        "class Item:\n"
        "    def __init__(self, at): self.nodeid = str(at)\n"
        "dealt = slow_tests.dealt([Item(at) for at in range(7)], {'6': 9.0, '5': 8.0, '4': 7.0}, 3)\n"
        "print(' '.join(item.nodeid for item in dealt))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.stdout.split() == ["6", "0", "3", "5", "1", "4", "2"], done.stderr

"""What is known to be raised by every call, after one."""

from __future__ import annotations

import importlib.util

import pytest
from kernel_agent.certain import raised_by_every_call

HEAD = """import math


def twice(x):
    return 2 * x


def entry(x, n=3):
"""


def certain(tmp_path, body, source=""):
    """Of what entry(1.0) raises, with this body."""
    path = tmp_path / "pair.py"
    path.write_text(source or HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    spec = importlib.util.spec_from_file_location("pair", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.entry(1.0)
    except Exception as exc:  # noqa: BLE001 (whatever it is)
        return raised_by_every_call(exc, str(path))
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('not written yet')",
        "return trice(x)",
        "y = math.logg(x)",
        "twice(x, by=2)",
        "twice()",
        "twice(x, 2)",
        "y = x if n else 1\nmath.logg(y)",
        "if n > 9:\n    y = 1\nmath.logg(x)",
        "with open(__file__) as f:\n    math.logg(x)",
        "twice(\n    math.logg(\n        x))",
    ],
)
def test_statement_that_every_run_comes_to__is_certain(tmp_path, body):
    assert certain(tmp_path, body)


@pytest.mark.parametrize(
    "body",
    [
        "if n > 2:\n    raise RuntimeError('only large ones')",
        "if n > 2:\n    math.logg(x)",
        "for _ in range(n):\n    math.logg(x)",
        "while n:\n    math.logg(x)",
        "try:\n    math.logg(x)\nfinally:\n    n = 1",
        "if n > 9:\n    return 0\nmath.logg(x)",
        "y = math.logg(x) if n else 0",
        "y = n and math.logg(x)",
        "y = [math.logg(k) for k in range(n)]",
        "y = 1 < n < math.logg(x)",
        "f = lambda: math.logg(x)\nf()",
    ],
)
def test_statement_that_a_run_may_leave_out__is_not(tmp_path, body):
    assert not certain(tmp_path, body)


@pytest.mark.parametrize(
    "body",
    [
        "y = 1 / (n - 3)",
        "y = [1][n]",
        "y = x.bit_count()",
        "y = x @ x",
        "assert n == 2",
        "y = math.sqrt(-x)",
        "if n > 9:\n    y = 1\nreturn y",
    ],
)
def test_error_that_may_hang_on_values__is_not(tmp_path, body):
    assert not certain(tmp_path, body)


def test_caller_of_the_statement__has_to_be_reached_too(tmp_path):
    source = "import math\n\ndef inner(x):\n    math.logg(x)\n\ndef entry(x):\n    {}inner(x)\n"
    assert certain(tmp_path, "", source.format(""))
    assert not certain(tmp_path, "", source.format("if x == 1: "))


def test_one_of_two_functions_of_the_name__is_not(tmp_path):
    two = "".join(f"class {c}:\n    def run(self):\n        raise ValueError\n\n" for c in "AB")
    assert not certain(tmp_path, "", two + "def entry(x):\n    A().run()\n")


def test_exception_of_elsewhere__is_not(tmp_path):
    (tmp_path / "pair.py").write_text(HEAD)
    assert not raised_by_every_call(NameError("x"), str(tmp_path / "pair.py"))

"""The entry of a child: errors of the machine rather than of the file."""

from __future__ import annotations

import sys

import pytest
from kernel_agent import child


@pytest.mark.parametrize("name", ["torch", "triton", "numpy"])
def test_python_without_a_needed_module__is_told_so_with_the_remedy(name):
    error = child._error(ModuleNotFoundError(f"No module named {name!r}", name=name), {"op": "inspect"})
    assert error.message == f"{sys.executable} has no module {name}"
    assert "--python" in error.remedy and error.traceback in (None, "")


def test_module_that_the_users_file_wants__is_another_error():
    error = child._error(ModuleNotFoundError("No module named 'einops'", name="einops"), {"op": "inspect"})
    assert "has no module" not in error.message

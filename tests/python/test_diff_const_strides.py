"""Strides as constexprs and grids as triples: the same schedules as with run-time strides and plain grids."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft

# Sizes that the interpreter takes.
EXAMPLES = {
    "attention": {"B": 2, "H": 2, "N": 50, "D": 16, "causal": True},
    "cross_entropy": {"M": 6, "V": 50},
    "grouped_gemm": {"G": 2, "M": 40, "N": 40, "K": 24},
    "layer_norm": {"M": 5, "N": 40},
    "linear_recurrence": {"B": 2, "T": 7, "D": 20, "gate": True, "h0": True},
    "matmul": {"M": 33, "N": 40, "K": 24, "leaky": False},
    "rms_norm": {"B": 2, "T": 3, "N": 40},
    "softmax": {"M": 5, "N": 40},
    "swiglu": {"B": 2, "T": 3, "F": 100},
}


def with_constant_strides(source: str) -> str:
    """Every parameter of a kernel that is called a stride becomes a constexpr, every grid a triple."""
    lines = source.splitlines()
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            edits += [
                (a.end_lineno or 0, a.end_col_offset or 0, ": tl.constexpr")
                for a in node.args.args
                if "stride" in a.arg and a.annotation is None
            ]
        launch = isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and node.func.slice
        grid = node.body if isinstance(node, ast.Lambda) else launch
        if isinstance(grid, ast.Tuple):
            last = grid.elts[-1]
            edits.append((last.end_lineno or 0, last.end_col_offset or 0, ", 1" * (3 - len(grid.elts))))
    for line, column, text in sorted(edits, reverse=True):
        lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    return "\n".join(lines).replace(", 1,)", ", 1)") + "\n"


def with_functions_of_grids(source: str) -> str:
    """Every lambda that is a grid becomes a function in the stub."""
    return re.sub(r"    grid = lambda (\w+): (.*)", r"    def grid(\1):\n        return \2\n", source)


@pytest.mark.parametrize("name", ["linear_recurrence", "swiglu"])
def test_grid_that_is_a_function__has_the_schedule_of_the_lambda(
    name: str, write: Callable[[str], Path]
) -> None:
    source = with_constant_strides((ROOT / "examples" / f"{name}.py").read_text())
    other = write(with_functions_of_grids(source))
    assert "def grid(" in other.read_text()
    plain, made = (
        draft(path, EXAMPLES[name])["report"] for path in (ROOT / "examples" / f"{name}.py", other)
    )
    for member in ("schedule", "atomics", "tape_bytes"):
        assert made[member] == plain[member], (member, made["lines"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_with_constant_strides__has_the_same_schedule(
    name: str, write: Callable[[str], Path]
) -> None:
    file = ROOT / "examples" / f"{name}.py"
    other = write(with_constant_strides(file.read_text()))
    assert other.read_text() != file.read_text()
    plain, made = (draft(path, EXAMPLES[name])["report"] for path in (file, other))
    for member in ("schedule", "atomics", "tape_bytes"):
        assert made[member] == plain[member], (member, made["lines"])


WINDOWS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 9}]


@triton.jit
def window_kernel(x_ptr, y_ptr, STEP: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0)
    x = tl.load(x_ptr + at * STEP + tl.arange(0, WIDTH))
    tl.store(y_ptr + at, tl.sum(x * x, 0))


@autodiff(inputs_require_grad=(0,))
def window(x, step=2):
    x = x.contiguous()
    n = (x.numel() - 4) // step + 1
    y = torch.empty(n, device=x.device, dtype=x.dtype)
    window_kernel[(n,)](x, y, STEP=step, WIDTH=4)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(4 * dims["N"], device=device, dtype=dtype)
    return (x,), {"step": dims["step"]}
"""


@pytest.mark.parametrize("step", [2, 4, 5])
def test_windows_that_overlap__are_never_taken_for_rows(step: int, write: Callable[[str], Path]) -> None:
    file = write(WINDOWS)
    result = draft(file, {"N": 9, "step": step})
    plain = "tl.store(d_x_ptr" in result["backward"]
    assert plain or step < 4
    assert_right(file, result, [({"N": n, "step": step}, "normal") for n in (9, 1, 30)])

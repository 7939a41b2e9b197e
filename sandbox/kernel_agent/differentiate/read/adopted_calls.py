"""Whether the functions that launch, the user's or of other modules, are called as their copies will be.

A copy calls another by name. What a launch was reached by else, a method or a variable, would call the
function itself in the backward part too, and leave out its gradient.
"""

from __future__ import annotations

import ast
import sys
from itertools import islice
from types import FrameType

from triton import KernelInterface

from ...source import tree_nodes
from ..ir.refusal import Refusal
from .host_functions import HostFunctions


def check(path: str, hosts: HostFunctions, kernel: str, stub: str) -> None:
    """Refuse a launch of a kernel, from within it, where some function of the file on the way to it from the
    stub is not called by its name in the one before."""
    inner: ast.FunctionDef | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == path and not _is_of_launcher(frame):
            line = frame.f_lineno
            function = next((f for f in hosts.by_name.values() if line in _lines(f)), None)
            if function is None:
                raise _unnamed(kernel, "code outside of the top level's functions", line)
            if inner is None or function is inner:
                inner = function
            elif not _decorates(function, inner):
                if not any(hosts.called(node) == inner.name for node in _calls(function, frame)):
                    raise _unnamed(kernel, f"{function.name}()", line)
                inner = function
            if function.name == stub:
                return
        frame = frame.f_back


def _is_of_launcher(frame: FrameType) -> bool:
    """Whether a frame is of a method of what launches a kernel: the launch itself has called it."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return bool(names) and isinstance(frame.f_locals.get(names[0]), KernelInterface)


def _lines(function: ast.FunctionDef) -> range:
    return range(function.lineno, (function.end_lineno or function.lineno) + 1)


def _calls(function: ast.FunctionDef, frame: FrameType) -> list[ast.Call]:
    """The call that a frame of a function is in; where it is in something else, as a `with`, those within."""
    found = [node for node in tree_nodes(function) if isinstance(node, ast.Call)]
    line, end, column, last = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end is None or column is None or last is None:
        return []
    spans = {node: (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) for node in found}
    exact = [node for node in found if spans[node] == (line, column, end, last)]
    begins, ends = (line, column), (end, last)
    return exact or [n for n, (a, b, c, d) in spans.items() if begins <= (a, b) and (c or 0, d or 0) <= ends]


def _decorates(function: ast.FunctionDef, inner: ast.FunctionDef) -> bool:
    """Whether a frame is of what a decorator has made around a function."""
    names = {n.id for d in inner.decorator_list for n in tree_nodes(d) if isinstance(n, ast.Name)}
    return function.name in names


def _unnamed(kernel: str, where: str, line: int) -> Refusal:
    message = f"{where} leads to the launch of {kernel}, but calls no function by its name"
    return Refusal("launch", message, "Call the function that launches by its name.", line)

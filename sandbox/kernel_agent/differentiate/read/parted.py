"""Outputs that are views of a fresh tensor, `mean, rstd = torch.empty((2, N))` or
`torch.empty(B, S, H, D).transpose(1, 2)`: autograd follows a launch into one view alone. Where nothing but
the parts or the view is used, they may be tensors of their own over the same memory; tracing sees them so,
and so does the copy of the host function."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...forward import Forward
from ...source import tree_nodes
from .host_functions import HostFunctions, Method

PARTED = "parted"
CONSTRUCT = "view as output"
_FRESH = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "new_empty", "new_zeros", "new_full")
_VIEWS = ("transpose", "permute", "view", "unsqueeze", "squeeze", "t", "swapaxes", "movedim", "unflatten")


@dataclass(frozen=True)
class Apart:
    """An expression of a host function: a tensor whose parts are to be tensors of their own, or a view that
    is to be one."""

    value: ast.expr
    parts: bool

    def text(self, written: str) -> str:
        """What stands in its place."""
        return f"{PARTED}({written})" if self.parts else f"{written}.detach()"


def find(fwd: Forward) -> list[Apart]:
    """Fresh tensors of which only the parts along the first axis are used, and views of those that have no
    name. Not in a function that others are made of, by decorators."""
    found: list[Apart] = []
    for function in HostFunctions(fwd.tree).by_name.values():
        marks = int(function.name == fwd.stub_name)
        named = any(isinstance(n, ast.Name) and n.id == PARTED for n in tree_nodes(function))
        if isinstance(function, Method) or named or len(function.decorator_list) > marks:
            continue
        for statement in (node for node in tree_nodes(function) if isinstance(node, ast.Assign)):
            if _is_fresh(fwd, statement.value) and _is_parted(statement, function):
                found.append(Apart(statement.value, parts=True))
            elif isinstance(statement.targets[0], ast.Name) and _is_view(fwd, statement.value):
                found.append(Apart(statement.value, parts=False))
    return found


def _place(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _is_view(fwd: Forward, value: ast.expr) -> bool:
    """Whether an expression is a view of a fresh tensor, by methods."""
    methods = 0
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS:
        value, methods = value.func.value, methods + 1
    return methods > 0 and _is_fresh(fwd, value)


def _is_fresh(fwd: Forward, value: ast.expr) -> bool:
    """Whether torch, or a method of a tensor, allocates it."""
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)):
        return False
    owner = value.func.value
    of_torch = isinstance(owner, ast.Name) and vars(fwd.module).get(owner.id) is torch
    return value.func.attr in _FRESH and (of_torch or value.func.attr.startswith("new_"))


def _is_parted(statement: ast.Assign, function: ast.FunctionDef) -> bool:
    match statement.targets:
        case [ast.Tuple(names) | ast.List(names)]:
            return len(names) > 1 and all(isinstance(name, ast.Name) for name in names)
        case [ast.Name(name)]:
            named = [n for n in tree_nodes(function) if isinstance(n, ast.Name) and n.id == name]
            apart = {
                id(node.value)
                for node in tree_nodes(function)
                if isinstance(node, ast.Starred) or (isinstance(node, ast.Subscript) and _is_part(node))
            }
            return len(named) > 1 and all(n is statement.targets[0] or id(n) in apart for n in named)
    return False


def _is_part(node: ast.Subscript) -> bool:
    at = node.slice.value if isinstance(node.slice, ast.Constant) else None
    return isinstance(node.ctx, ast.Load) and isinstance(at, int) and not isinstance(at, bool)


class _Parting(ast.NodeTransformer):
    def __init__(self, found: Sequence[Apart]) -> None:
        self.found = {_place(one.value): one for one in found}

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        one = self.found.get(_place(node))
        if one is None:
            return node
        if one.parts:
            new = ast.Call(ast.Name(PARTED, ast.Load()), [node], [])
        else:
            new = ast.Call(ast.Attribute(node, "detach", ast.Load()), [], [])
        return ast.fix_missing_locations(ast.copy_location(new, node))


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    return [part.detach() for part in t.unbind()]


@contextlib.contextmanager
def apart(fwd: Forward, found: Sequence[Apart]) -> Iterator[None]:
    """Host functions of the file part these tensors, until the end."""
    names, stub = vars(fwd.module), fwd.stub
    lines = {one.value.lineno for one in found}
    changed = [
        f
        for f in fwd.tree.body
        if isinstance(f, ast.FunctionDef) and lines & set(range(f.lineno, (f.end_lineno or f.lineno) + 1))
    ]
    before = {name: names[name] for name in [f.name for f in changed] + [PARTED] if name in names}
    try:
        for function in changed:
            text = _Parting(found).visit(copy.deepcopy(function))
            text.decorator_list = []
            module = ast.Module([text], [])
            exec(compile(module, fwd.path, "exec"), names)  # noqa: S102 (the user's own function)
            if function.name == fwd.stub_name:
                fwd.stub = names[function.name]
        if changed:
            names[PARTED] = _parts
        yield
    finally:
        for name in [f.name for f in changed] + [PARTED]:
            names.pop(name, None)
        names.update(before)
        fwd.stub = stub

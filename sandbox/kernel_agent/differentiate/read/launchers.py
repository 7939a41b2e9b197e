"""Launchers that a host function makes itself, `tuned = triton.autotune(configs, key)(kernel)`, or has
another name for. A generated Function is beside the host function, and launches by a name of the top level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...forward import Forward
from ...launches import jit_function
from ...source import tree_nodes
from .host_functions import HostFunctions


def hoist(fwd: Forward) -> None:
    """Have the launches of the file name their launchers at the top level, where these hang on nothing that a
    call computes. `fwd.hoisted` is what the backward part has to define for that, by name."""
    if fwd.hoisted is not None:
        return
    made = fwd.hoisted = dict[str, str]()
    for function in HostFunctions(fwd.tree).by_name.values():
        for call in _launches(function):
            launcher = call.func.value  # type: ignore[attr-defined]
            value = launcher
            if isinstance(launcher, ast.Name):
                value = _assigned(function, launcher.id) or launcher
            if (
                value is launcher
                and isinstance(launcher, ast.Name)
                or _used(value) & _locals(function, value)
            ):
                continue
            name = value.id if isinstance(value, ast.Name) else _named(fwd, launcher, value, made)
            if name is not None:
                call.func.value = ast.copy_location(ast.Name(name, ast.Load()), launcher)  # type: ignore[attr-defined]


def _launches(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in tree_nodes(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield node


def _assigned(function: ast.FunctionDef, name: str) -> ast.expr | None:
    """The one value of a variable; None where there are others, or none."""
    stores = [n for n in tree_nodes(function) if isinstance(n, ast.Name) and n.id == name and _is_store(n)]
    found = [
        n.value
        for n in tree_nodes(function)
        if isinstance(n, ast.Assign) and len(n.targets) == 1 and n.targets[0] in stores
    ]
    return found[0] if len(stores) == len(found) == 1 and name not in _parameters(function) else None


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _parameters(node: ast.AST) -> set[str]:
    return {n.arg for n in tree_nodes(node) if isinstance(n, ast.arg)}


def _bound(node: ast.AST) -> set[str]:
    """What an expression, or a function, gives names to."""
    return {n.id for n in tree_nodes(node) if isinstance(n, ast.Name) and _is_store(n)} | _parameters(node)


def _used(value: ast.expr) -> set[str]:
    return {n.id for n in tree_nodes(value) if isinstance(n, ast.Name)} - _bound(value)


def _locals(function: ast.FunctionDef, value: ast.expr) -> set[str]:
    """The names that a function has of its own, besides those within an expression."""
    within = {id(n) for n in tree_nodes(value)}
    nodes = [n for n in tree_nodes(function) if id(n) not in within]
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and _is_store(n)}
    return stored | {n.arg for n in nodes if isinstance(n, ast.arg)}


def _is_around_kernel(value: ast.expr, names: dict) -> bool:
    """Whether an expression is `wrapper(...)(kernel)`, or an entry of a table: the same in every call."""
    match value:
        case ast.Name(name):
            return jit_function(names.get(name)) is not None
        case ast.Subscript(ast.Name(), ast.Constant()):
            return True
        case ast.Call(ast.Call(), [inner], []):
            return _is_around_kernel(inner, names)
    return False


def _named(fwd: Forward, launcher: ast.expr, value: ast.expr, made: dict[str, str]) -> str | None:
    """A name at the top level for the launcher that an expression makes; None for what is no launcher."""
    names, text = vars(fwd.module), ast.unparse(value)
    known = next((name for name, other in made.items() if other == text), None)
    if known is not None or not _is_around_kernel(value, names):
        return known
    try:
        with fwd.active():
            found = eval(compile(ast.Expression(value), fwd.path, "eval"), names)
    except Exception:  # noqa: BLE001 (the launch is refused instead)
        return None
    kernel = jit_function(found)
    if kernel is None:
        return None
    name = launcher.id if isinstance(launcher, ast.Name) else f"{kernel.fn.__name__}_launcher"
    while name in names:
        name += "_"
    names[name], made[name] = found, text
    return name

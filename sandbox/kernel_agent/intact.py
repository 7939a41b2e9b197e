"""What a user's file may not change as it is imported: the functions and classes of this package, torch and
Triton, in the process that is to judge it.

    before = taken()
    ...                 the file runs
    changed(before)     "torch.equal", or None

For modules that hold their own backward: there the oracle's process imports what is to be checked.
"""

from __future__ import annotations

import ast
import sys
import types
from typing import Any

from .errors import Unusable
from .source import tree_nodes, words

_WATCHED = ("kernel_agent", "triton")  # with all that is below them
_ALSO = words(
    """builtins sys json inspect numpy torch torch._tensor torch.autograd torch.autograd.function
    torch.autograd.graph torch.nn.functional torch.overrides torch.utils._python_dispatch"""
)
_DECORATOR = ("kernel_agent", "kernel_agent.autodiff", "kernel_agent.autodiff.autodiff")
_OURS = "kernel_agent."
_REMEDY = "keep what patches, times or inspects other code in a file of its own"

Snapshot = dict[str, dict[str, Any]]


def taken() -> Snapshot:
    """Functions, classes and modules by where they are found; also those of classes. Holds what it lists."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in _WATCHED and name not in _ALSO:
            continue
        if not isinstance(module, types.ModuleType):
            continue
        found[name] = _parts(vars(module))
        for value in list(found[name].values()):
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}.{value.__qualname__}"] = _parts(vars(value))
    return found


def _parts(names: Any) -> dict[str, Any]:
    kinds = (type, types.ModuleType, staticmethod, classmethod, property)
    return {name: value for name, value in list(names.items()) if callable(value) or isinstance(value, kinds)}


def changed(before: Snapshot) -> str | None:
    """The first that is another one now, or gone; of this package also what is new."""
    if not before:  # nothing is watched: of a forward or a pair, no part of which is judged as it is imported
        return None
    now = taken()
    for where, parts in before.items():
        found = now.get(where, {})
        for name, value in parts.items():
            if found.get(name) is not value:
                return f"{where}.{name}"
        new = found.keys() - parts.keys() if where.startswith(_OURS) else ()
        for name in sorted(new):
            if not isinstance(found[name], types.ModuleType):
                return f"{where}.{name}"
    return None


def require_unchanged(before: Snapshot, file: str) -> None:
    what = changed(before)
    if what is not None:
        raise Unusable("import", f"the file changes {what} as it is imported", file, remedy=_REMEDY)


def require_no_judge(tree: ast.Module, file: str) -> None:
    """Of this package a file imports the decorator alone. Raises Unusable("import")."""
    for node in tree_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        else:
            continue
        for path in named:
            if path.split(".")[0] == "kernel_agent" and path not in _DECORATOR:
                raise Unusable(
                    "import",
                    f"imports {path}, which is part of what judges the file",
                    file,
                    node.lineno,
                    node.col_offset + 1,
                    "of kernel_agent a file imports the decorator: from kernel_agent import autodiff",
                )

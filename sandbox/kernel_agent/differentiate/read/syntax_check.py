"""The statements of Python that no pass understands: a kernel with one is refused before any pass. One that
raises is refused where it is read: most stand in branches that a call does not take.
"""

from __future__ import annotations

import ast

from ...source import tree_nodes
from ..ir.refusal import Refusal

_STATEMENTS: dict[type, str] = {
    **{kind: kind.__name__.lower() for kind in (ast.Break, ast.Continue, ast.Try, ast.With, ast.Global)},
    **{kind: kind.__name__.lower() for kind in (ast.Nonlocal, ast.Import, ast.Lambda, ast.Await, ast.Yield)},
    ast.FunctionDef: "nested function",
    ast.ClassDef: "class",
    ast.ImportFrom: "import",
    ast.Delete: "del",
    ast.ListComp: "comprehension",
    ast.GeneratorExp: "comprehension",
}


def check(kernel: ast.FunctionDef) -> None:
    """Raises Refusal at the first of them."""
    for node in (inner for statement in kernel.body for inner in tree_nodes(statement)):
        for kind, name in _STATEMENTS.items():
            if isinstance(node, kind):
                raise Refusal(name, f"`{name}` in a kernel is not supported").at(node)
        if isinstance(node, (ast.For, ast.While)) and node.orelse:
            raise Refusal("loop else", "the else branch of a loop is not supported").at(node)

"""What a stub changes of its caller's and leaves so: running statistics.

Autograd hears nothing of that. A Function that returned such a tensor would have to mark it as changed, which
torch takes of no leaf that wants a gradient, and of no view beside other outputs.
"""

from __future__ import annotations

import ast

from ...source import tree_nodes


def is_left(stub: str, host: ast.FunctionDef, call: ast.Call, passed: ast.expr | None) -> bool:
    """Whether the stub changes the tensor that a launch is `passed`, and does no more with it."""
    if host.name != stub or not isinstance(passed, ast.Name):
        return False
    name, above = (
        passed.id,
        {child: node for node in tree_nodes(host) for child in ast.iter_child_nodes(node)},
    )
    params = {a.arg for a in (*host.args.posonlyargs, *host.args.args, *host.args.kwonlyargs)}
    node: ast.AST = call
    while (node := above[node]) is not host:
        if isinstance(node, ast.For | ast.While | ast.Lambda | ast.FunctionDef):
            return False
    return name in params and all(
        use is passed or _only_asks(use, above)
        for use in tree_nodes(host)
        if isinstance(use, ast.Name) and use.id == name
    )


def _only_asks(use: ast.Name, above: dict[ast.AST, ast.AST]) -> bool:
    """Whether a name is assigned to, asked for, or stands for itself: `x = y if x is None else x`."""
    if isinstance(use.ctx, ast.Store):
        return True
    parent = above[use]
    if isinstance(parent, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in parent.ops)
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("shape", "stride", "numel", "size", "dtype", "device", "is_contiguous")
    if isinstance(parent, ast.IfExp):
        assigned = above[parent]
        return isinstance(assigned, ast.Assign) and [ast.unparse(t) for t in assigned.targets] == [use.id]
    return False

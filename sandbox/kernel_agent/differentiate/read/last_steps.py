"""What a loop does in its last step alone, done behind it:

for i in range(steps):                      for i in range(steps):
    acc += f(i)                                 acc += f(i)
    if i == steps - 1:              ->      if 0 < steps:
        tl.store(y, acc)                        tl.store(y, acc)
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from ...source import tree_nodes
from ..ir.values import assigned_names

ONE = ast.Constant(1)


def behind(loop: ast.For, tl: str, known: Collection[str]) -> tuple[ast.For, ast.If] | None:
    """The loop over a range with a step above zero without what its last step ends with, and that; None where
    there is no such thing. `tl`: the name of triton.language; `known`: what has a value before the loop."""
    match loop:
        case ast.For(
            ast.Name(name), ast.Call(args=[_, *_] as bounds), [_, *_, ast.If(test, moved, []) as last]
        ) if len(bounds) <= 3:
            body = loop.body[:-1]
        case _:
            return None
    first, end = (ast.Constant(0), bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    step = bounds[2] if len(bounds) > 2 else ONE
    if not _is_last(test, loop.target, end, step) or any(isinstance(n, ast.Return) for n in tree_nodes(last)):
        return None
    changed = {*assigned_names(loop.body), name}
    used = _loaded([first, end, step])
    if used & changed or (_loaded(moved) & set(assigned_names(body))) - set(known):
        return None
    if _text(step) == "1":
        value: ast.expr = ast.BinOp(end, ast.Sub(), ONE)
    else:
        cdiv = ast.Attribute(ast.Name(tl, ast.Load()), "cdiv", ast.Load())
        steps = ast.Call(cdiv, [ast.BinOp(end, ast.Sub(), first), step], [])
        before = ast.BinOp(ast.BinOp(steps, ast.Sub(), ONE), ast.Mult(), step)
        value = ast.BinOp(first, ast.Add(), before)
    at_last = [ast.Assign([ast.Name(name, ast.Store())], value)] if name in _loaded(moved) else []
    new = ast.copy_location(ast.If(ast.Compare(first, [ast.Lt()], [end]), [*at_last, *moved], []), last)
    for part in (new.test, *at_last):
        ast.copy_location(part, last)
    rest = ast.copy_location(ast.For(loop.target, loop.iter, body, loop.orelse), loop)
    return rest, ast.fix_missing_locations(new)


def _is_last(test: ast.expr, variable: ast.expr, end: ast.expr, step: ast.expr) -> bool:
    """Whether a condition holds in the last step of a loop alone."""
    before, after = ast.BinOp(end, ast.Sub(), step), ast.BinOp(variable, ast.Add(), step)
    pairs = [(variable, before), (after, end)]
    if isinstance(end, ast.Constant) and isinstance(step, ast.Constant) and isinstance(end.value, int):
        pairs.append((variable, ast.Constant(end.value - step.value)))  # type: ignore[operator]
    operators = [ast.GtE(), *[ast.Eq()] * (_text(step) == "1")]
    return _text(test) in {_text(ast.Compare(a, [op], [b])) for a, b in pairs for op in operators}


def _text(node: ast.expr) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _loaded(nodes: Collection[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in tree_nodes(node) if isinstance(n, ast.Name) and _is_load(n)}


def _is_load(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)

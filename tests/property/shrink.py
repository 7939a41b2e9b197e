"""Make a failing program small: drop statements and replace expressions by their parts while it goes on
failing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator


def shrink(source: str, fails: Callable[[str], bool], most: int = 400) -> str:
    """The smallest source found with at most `most` trials of `fails`. Only the kernel and the helpers are
    changed."""
    trials = 0
    better = True
    while better and trials < most:
        better = False
        for smaller in _smaller(source):
            trials += 1
            if trials > most:
                break
            if fails(smaller):
                source, better = smaller, True
                break
    return source


def _smaller(source: str) -> Iterator[str]:
    """Variants of the source, the boldest first."""
    count = len(list(_changes(ast.parse(source))))
    for at in range(count):
        tree = ast.parse(source)
        changes = list(_changes(tree))
        changes[at]()
        yield ast.unparse(tree)


def _changes(tree: ast.Module) -> Iterator[Callable[[], None]]:
    """Every single change, as a function that makes it in this tree. The order is the same for equal
    trees."""
    kernels = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "kernel"]
    for node in [n for k in kernels for n in ast.walk(k)]:
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and (len(block) > 1 or name == "orelse"):
                for statement in block:
                    yield lambda block=block, statement=statement: block.remove(statement)
            if isinstance(block, list):
                for statement in block:
                    if isinstance(statement, (ast.If, ast.For)):
                        yield lambda block=block, statement=statement: _unwrap(block, statement)
    for node in [n for k in kernels for s in k.body for n in ast.walk(s)]:
        for name, value in ast.iter_fields(node):
            values = value if isinstance(value, list) else [value]
            for index, old in enumerate(values):
                if not isinstance(old, (ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript)):
                    continue
                for part in _parts(old):
                    yield lambda n=node, f=name, v=value, i=index, p=part: _put(n, f, v, i, p)


def _parts(node: ast.expr) -> list[ast.expr]:
    """What an expression could be replaced by."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript):
        return [node.value]
    inner = node.func.value if isinstance(node.func, ast.Attribute) else None
    owner = [inner] if isinstance(inner, (ast.Call, ast.BinOp)) else []
    return [*owner, *node.args]


def _unwrap(block: list[ast.stmt], statement: ast.If | ast.For) -> None:
    at = block.index(statement)
    block[at : at + 1] = statement.body


def _put(node: ast.AST, name: str, value: object, index: int, part: ast.expr) -> None:
    if isinstance(value, list):
        value[index] = part
    else:
        setattr(node, name, part)

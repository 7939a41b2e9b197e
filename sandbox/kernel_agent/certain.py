"""Whether what a call raised is raised by every call, as the text alone shows: what has to be mended then is
known after one case.

Two things make it so. Every frame of the file is at a statement that each run of its function comes to: none
that is inside a branch, a loop or a `try`, or below one of these that may leave. And the statement cannot do
otherwise: it is a `raise`, or it asks for a name, an attribute of a module or a parameter that there is not.
Anything else may hang on the data, and is not certain here.
"""

from __future__ import annotations

import ast
import re
from types import ModuleType

from .errors import user_frames
from .source import tree_nodes

# A call that does not fit what is called, whatever the values.
_MISFIT = re.compile(
    r"got an unexpected keyword argument|missing \d+ required |takes .*positional arguments? but "
    r"|got multiple values for |missing a required argument|too many positional arguments"
    r"|was specified but unrecognised"
)
# What may leave part of a statement out.
_SOMETIMES = (
    ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await,
    ast.Yield, ast.YieldFrom,
)  # fmt: skip
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def raised_by_every_call(exc: BaseException, path: str) -> bool:
    """Of an exception out of the pair at `path`. False where it cannot be told."""
    lines = [frame.lineno or 0 for frame in user_frames(exc.__traceback__, [path])]
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False
    statements = [_always_reached(tree, line) for line in lines]
    if not statements or None in statements:
        return False
    return isinstance(statements[-1], ast.Raise) or _does_not_hang_on_values(exc)


def _does_not_hang_on_values(exc: BaseException) -> bool:
    if isinstance(exc, AttributeError):
        return isinstance(exc.obj, (ModuleType, type))
    if isinstance(exc, (TypeError, KeyError)):
        return bool(_MISFIT.search(str(exc)))
    return type(exc) is NameError  # not of a local that no branch has set


def _always_reached(tree: ast.Module, line: int) -> ast.stmt | None:
    """The statement of this line, if every run of its function comes to it and executes all of it."""
    function = _function_at(tree, line)
    body = function.body if function is not None and not _has_namesake(tree, function) else []
    while True:
        at = next((n for n, one in enumerate(body) if _covers(one, line)), None)
        if at is None or any(_may_leave(one) for one in body[:at]):
            return None
        statement = body[at]
        if isinstance(statement, ast.With) and not any(_covers(item, line) for item in statement.items):
            body = statement.body
        elif isinstance(
            statement, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise)
        ):
            return None if any(_is_partial(node) for node in tree_nodes(statement)) else statement
        else:
            return None


def _covers(node: ast.stmt | ast.withitem, line: int) -> bool:
    if isinstance(node, ast.withitem):
        node_line, end = node.context_expr.lineno, node.context_expr.end_lineno
    else:
        node_line, end = node.lineno, node.end_lineno
    return node_line <= line <= (end or node_line)


def _function_at(tree: ast.Module, line: int) -> ast.FunctionDef | None:
    found = [node for node in tree_nodes(tree) if isinstance(node, ast.FunctionDef) and _covers(node, line)]
    return max(found, key=lambda node: node.lineno, default=None)


def _has_namesake(tree: ast.Module, function: ast.FunctionDef) -> bool:
    """Of two backwards, a case may call one alone."""
    named = [n for n in tree_nodes(tree) if isinstance(n, ast.FunctionDef) and n.name == function.name]
    return len(named) > 1


def _may_leave(statement: ast.stmt) -> bool:
    """Whether a run may end in it without an exception, or jump."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.Return, ast.Try)):
            return True
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SCOPES)]
    return False


def _is_partial(node: ast.AST) -> bool:
    return isinstance(node, _SOMETIMES) or (isinstance(node, ast.Compare) and len(node.ops) > 1)

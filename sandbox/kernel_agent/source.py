"""The text of a forward file or a pair: reading and parsing it, without running it and without torch."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from .errors import Unusable

MARKER = "# ---- backward ----"


def words(text: str) -> frozenset[str]:
    """A set of names written as prose."""
    return frozenset(text.split())


# Fields of nodes that hold texts or numbers, or whether a name is read or written, in all that have them.
_PLAIN = words("id attr arg module level kind type_comment asname conversion simple is_async lineno rest ctx")
_holding: dict[type[ast.AST], tuple[str, ...]] = {}  # the others, by type of node


def read(file: str) -> str:
    """The file's text. Raises Unusable."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as exc:
        raise Unusable("import", f"the file cannot be read: {exc.strerror}", file) from exc
    except UnicodeDecodeError as exc:
        raise Unusable("syntax", f"the file is not UTF-8: {exc.reason} at byte {exc.start}", file) from exc


def parse(source: str, file: str) -> ast.Module:
    """The file's syntax tree. Raises Unusable("syntax")."""
    try:
        return ast.parse(source, file)
    except SyntaxError as exc:
        raise Unusable("syntax", f"{type(exc).__name__}: {exc.msg}", file, exc.lineno, exc.offset) from exc
    except (ValueError, RecursionError, MemoryError) as exc:
        raise Unusable("syntax", f"the file cannot be parsed: {exc}", file) from exc


def tree_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of ast.walk, in its order and in less than half of its time, without those that say whether a
    name is read or written. A draft looks through its trees a hundred times."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        what = type(node)
        fields = _holding.get(what)
        if fields is None:
            fields = _holding[what] = tuple(name for name in what._fields if name not in _PLAIN)
        for name in fields:
            value = getattr(node, name, None)
            if type(value) is list:
                for item in value:
                    if isinstance(item, ast.AST):
                        todo.append(item)
            elif isinstance(value, ast.AST):
                todo.append(value)
        yield node


def backward_starts(source: str) -> int | None:
    """The line of the marker, None where there is none."""
    for number, text in enumerate(source.splitlines(), start=1):
        if text.strip() == MARKER:
            return number
    return None


def autodiff_names(tree: ast.Module) -> set[str]:
    """Names that mean the decorator: `autodiff` and what it was imported as."""
    names = {"autodiff"}
    for node in tree_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernel_agent"):
            names.update(alias.asname for alias in node.names if alias.name == "autodiff" and alias.asname)
    return names

"""A pair's text with replacements in it: what every kind of mutation is made of."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

MARKER = "# ---- backward ----"


@dataclass(frozen=True)
class Mutant:
    pair: str  # path of the pair
    kind: str
    line: int  # in the pair
    at: str  # the text of that line
    nth: int  # of the lines with this text
    old: str
    new: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        """What equivalent.toml names it by: no line numbers, they move."""
        return self.pair, self.kind, self.at, self.nth, self.new

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(original.splitlines(), self.source.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


class Text:
    """The source of a pair; columns of `ast` are bytes."""

    def __init__(self, pair: str, source: str) -> None:
        self.pair = pair
        self.lines = source.splitlines()
        self.bytes = source.encode()
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))
        self.from_line = next(at for at, line in enumerate(self.lines, 1) if line.strip() == MARKER)

    def backward(self) -> list[ast.stmt]:
        """Top-level statements below the marker."""
        return [node for node in self.tree.body if node.lineno > self.from_line]

    def of(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.bytes[start:end].decode()

    def replace(self, kind: str, node: ast.AST, new: str) -> Mutant:
        start, end = self._span(node)
        source = (self.bytes[:start] + new.encode() + self.bytes[end:]).decode()
        line: int = node.lineno  # type: ignore[attr-defined]
        at = self.lines[line - 1].strip()
        nth = sum(other.strip() == at for other in self.lines[:line])
        return Mutant(self.pair, kind, line, at, nth, self.of(node), new, source)

    def swap(self, kind: str, whole: ast.AST, left: ast.AST, right: ast.AST) -> Mutant:
        """Two parts of `whole`, in this order and apart, exchanged."""
        begin, end = self._span(whole)
        (a, b), (c, d) = self._span(left), self._span(right)
        parts = self.bytes[begin:a], self.bytes[c:d], self.bytes[b:c], self.bytes[a:b], self.bytes[d:end]
        return self.replace(kind, whole, b"".join(parts).decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self.starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )


def called(node: ast.AST) -> str:
    """`store` for tl.store(...), `` for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def names_in(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(d).startswith(("triton.jit", "jit")) for d in node.decorator_list
    )


def functions(nodes: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions, and methods of classes."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body)

"""The text of a forward file or a pair: reading and parsing it, without running it and without torch."""

from __future__ import annotations

import ast
from pathlib import Path

from .errors import Unusable

MARKER = "# ---- backward ----"


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


def backward_starts(source: str) -> int | None:
    """The line of the marker, None where there is none."""
    for number, text in enumerate(source.splitlines(), start=1):
        if text.strip() == MARKER:
            return number
    return None


def autodiff_names(tree: ast.Module) -> set[str]:
    """Names that mean the decorator: `autodiff` and what it was imported as."""
    names = {"autodiff"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernel_agent"):
            names.update(alias.asname for alias in node.names if alias.name == "autodiff" and alias.asname)
    return names


def words(text: str) -> frozenset[str]:
    """A set of names written as prose."""
    return frozenset(text.split())

#!/usr/bin/env python3
"""The pairs of dataset/ as a whole: the list in its README, and pairs that are twins.

    scripts/dataset.py list [--check]    write the list of dataset/README.md from the files (or say it is old)
    scripts/dataset.py twins             pairs whose backward is another's but for names and numbers

Exit code 1 where --check finds an old list, or where there are twins.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "dataset" / "README.md"
MARKER = "# ---- backward ----"
FIELDS = ("op", "schedule", "dtypes", "difficulty")


def pairs() -> list[Path]:
    return sorted((ROOT / "dataset").glob("*/*.py"))


def fields_of(path: Path) -> dict[str, str]:
    """The four lines that end the docstring. Raises ValueError where one is missing."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = dict(re.findall(r"^(\w+): (.+)$", text, re.MULTILINE))
    missing = [name for name in FIELDS if name not in found]
    if missing:
        raise ValueError(f"{path}: its docstring lacks {', '.join(missing)}")
    return {name: found[name] for name in FIELDS}


def listed(files: Iterable[Path]) -> str:
    """A table for each family."""
    families: dict[str, list[Path]] = defaultdict(list)
    for path in files:
        families[path.parent.name].append(path)
    lines = []
    for family in sorted(families):
        lines += [f"### {family}", "", f"| pair | {' | '.join(FIELDS)} |", "|---" * (len(FIELDS) + 1) + "|"]
        for path in families[family]:
            cells = " | ".join(fields_of(path).values())
            lines.append(f"| [{path.stem}]({family}/{path.name}) | {cells} |")
        lines.append("")
    return "\n".join(lines)


def with_list(readme: str, files: list[Path]) -> str:
    families = len({path.parent for path in files})
    readme = re.sub(
        r"There are \d+\s+pairs\s+in\s+\d+\s+families",
        f"There are {len(files)} pairs in {families} families",
        readme,
    )
    head, _, rest = readme.partition("## What is here\n")
    tail = rest[rest.index("## Departures from the plan") :]
    return f"{head}## What is here\n\n{listed(files)}\n{tail}"


class Bare(ast.NodeTransformer):
    """Names by the order of their first use, no numbers, no words for people."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def bare(self, name: str) -> str:
        return self.names.setdefault(name, f"n{len(self.names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.name = self.bare(node.name)
        if ast.get_docstring(node) is not None and len(node.body) > 1:
            node.body = node.body[1:]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.bare(node.id), node.ctx) if node.id not in ("tl", "torch", "triton") else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.bare(node.arg), None)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        return ast.keyword(None if node.arg is None else self.bare(node.arg), node.value)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(0 if isinstance(node.value, int | float) else node.value)


def kernels_of(path: Path) -> frozenset[str]:
    """The kernels of a pair's backward, without names and numbers."""
    _, marker, backward = path.read_text().partition(MARKER)
    if not marker:
        raise ValueError(f"{path}: has no line {MARKER!r}")
    functions = [
        node
        for node in ast.parse(backward).body
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
    ]
    return frozenset(ast.unparse(Bare().visit(node)) for node in functions)


def twins(files: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Pairs with the same kernels in their backwards."""
    seen: dict[frozenset[str], Path] = {}
    found = []
    for path in files:
        kernels = kernels_of(path)
        if kernels and kernels in seen:
            found.append((seen[kernels], path))
        seen.setdefault(kernels, path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "twins"))
    parser.add_argument("--check", action="store_true", help="list: write nothing")
    options = parser.parse_args()
    if options.what == "twins":
        found = twins(pairs())
        for one, other in found:
            print(f"{one.relative_to(ROOT)} and {other.relative_to(ROOT)} have the same backward kernels")
        return int(bool(found))
    old = README.read_text()
    new = with_list(old, pairs())
    if options.check:
        if old != new:
            print("dataset/README.md: the list is old: scripts/dataset.py list")
        return int(old != new)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

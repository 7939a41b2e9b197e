"""The order of the house: what may import what, names, lengths. A line for each finding; run by `make lint`.

    python3 scripts/house.py [ROOT]      exit code 1 where something was found

A check is a function from the tree to findings; CHECKS lists them. Those of C are in house_c.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import house_c

# Folders of modules, in order: one may import those before it, and itself.
FOLDERS = (
    "sandbox/kernel_agent",
    "sandbox/kernel_agent/torch_tl",
    "sandbox/kernel_agent/operations",
    "sandbox/kernel_agent/differentiate/ir",
    "sandbox/kernel_agent/differentiate/prove",
    "sandbox/kernel_agent/differentiate/read",
    "sandbox/kernel_agent/differentiate/reverse",
    "sandbox/kernel_agent/differentiate/schedule",
    "sandbox/kernel_agent/differentiate/write",
    "sandbox/kernel_agent/differentiate",
)
NAMED_ONCE = ("sandbox", "scripts", "agent", "rag")  # below these no two source files have one name
COLUMNS = 110
LINES = 80  # of a function; `# long: why` on or above its first line allows more
AS_SENT = "prompts"  # its bytes go to models as they are

Imports = dict[str, dict[str, int]]  # module -> imported module -> line


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Tree:
    """The source files below a folder: those that git tracks, or all of them where there is no repository."""

    def __init__(self, root: Path) -> None:
        self.root = root
        if (root / ".git").exists():
            listed = subprocess.run(
                ["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True
            )
            names = [Path(name) for name in listed.stdout.splitlines() if (root / name).is_file()]
        else:
            names = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        self.files = sorted(name for name in names if _is_source(name))

    def text(self, file: Path) -> str:
        return (self.root / file).read_text()

    def parsed(self) -> Iterator[tuple[Path, ast.Module]]:
        for file in self.files:
            if file.suffix == ".py":
                yield file, ast.parse(self.text(file))

    @cached_property
    def modules(self) -> dict[str, Path]:
        """The modules of FOLDERS by their dotted names."""
        found = {}
        for file in self.files:
            if file.suffix == ".py" and file.parent.as_posix() in FOLDERS:
                parts = file.relative_to("sandbox").with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        return found

    @cached_property
    def imports(self) -> Imports:
        return {name: dict(_imports(self, name, file)) for name, file in self.modules.items()}


def _is_source(file: Path) -> bool:
    if file.parts[0] == AS_SENT:
        return False
    return file.suffix in (".c", ".h", ".md", ".py", ".sh") or file.name == "Makefile"


def _imports(tree: Tree, name: str, file: Path) -> Iterator[tuple[str, int]]:
    """The modules of the house that a module imports when it runs: type checkers' imports do not count."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in _executed(ast.parse(tree.text(file))):
        wanted: list[str] = []
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            wanted = [f"{base}.{alias.name}" for alias in node.names]
            wanted = [module if module in tree.modules else base for module in wanted]
        for module in wanted:
            if module in tree.modules and module != name:
                yield module, node.lineno


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _executed(child)


def order(tree: Tree) -> Iterator[Finding]:
    """A folder imports only those before it."""
    for name, imported in tree.imports.items():
        file = tree.modules[name]
        here = FOLDERS.index(file.parent.as_posix())
        for module, line in imported.items():
            if FOLDERS.index(tree.modules[module].parent.as_posix()) > here:
                yield Finding(str(file), line, f"{module} comes after this folder in the order of the house")


def circles(tree: Tree) -> Iterator[Finding]:
    """No module imports itself by way of others."""
    for circle in house_c.circles_of(tree.imports):
        last, first = circle[-2:]
        text = f"a circle of imports: {' -> '.join(circle)}"
        yield Finding(str(tree.modules[last]), tree.imports[last][first], text)


def names(tree: Tree) -> Iterator[Finding]:
    """A name says which file it is."""
    seen: dict[str, Path] = {}
    for file in tree.files:
        if file.parts[0] in NAMED_ONCE and file.suffix in (".py", ".c") and file.name != "__init__.py":
            other = seen.setdefault(file.name, file)
            if other != file:
                yield Finding(str(file), 1, f"{other} has the same name")


def functions(tree: Tree) -> Iterator[Finding]:
    """What is long is divided, or says why not."""
    for file, module in tree.parsed():
        lines = tree.text(file).splitlines()
        for node in ast.walk(module):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield from _length(
                    file, lines, "# long: ", node.name, first, node.lineno, node.end_lineno or 0
                )
    for file in tree.files:
        if file.suffix != ".c":
            continue
        lines = tree.text(file).splitlines()
        opened = 0
        for number, line in enumerate(lines, 1):
            if line == "{":
                opened = number
            elif line == "}" and opened:
                start = opened - 1
                while start > 1 and not re.match(r"\w", lines[start - 1]):
                    start -= 1
                name = re.search(r"(\w+)\(", lines[start - 1])
                yield from _length(file, lines, "/* long: ", name[1] if name else "?", start, opened, number)
                opened = 0


def _length(
    file: Path, lines: list[str], mark: str, name: str, first: int, head: int, last: int
) -> Iterator[Finding]:
    """`first` is where the function starts with its decorators; a reason may stand up to `head`."""
    count = last - head + 1
    if count > LINES and not any(mark in line for line in lines[max(first - 2, 0) : head]):
        yield Finding(str(file), head, f"{name} has {count} lines, more than {LINES}")


def columns(tree: Tree) -> Iterator[Finding]:
    """No line is wider than the page, but for tables, addresses, and what Markdown shows as code.

    A table in Python is a statement that the formatter leaves alone. Marks for the tools at the end of a line
    do not count.
    """
    for file in tree.files:
        lines = tree.text(file).splitlines()
        left = _tables(lines) if file.suffix == ".py" else _shown(lines) if file.suffix == ".md" else set()
        for number, line in enumerate(lines, 1):
            width = len(_MARK.sub("", line))
            if width > COLUMNS and number not in left and "://" not in line:
                yield Finding(str(file), number, f"{width} columns, more than {COLUMNS}")


_MARK = re.compile(r"  # (type: ignore|noqa|fmt: skip).*$")


def _tables(lines: list[str]) -> set[int]:
    """The lines of statements that end in `# fmt: skip`."""
    ends = {number for number, line in enumerate(lines, 1) if line.endswith("# fmt: skip")}
    module = ast.parse("\n".join(lines)) if ends else ast.Module([], [])
    found: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.stmt) and node.end_lineno in ends:
            found.update(range(node.lineno, node.end_lineno + 1))
    return found


def _shown(lines: list[str]) -> set[int]:
    """The lines of Markdown's tables and code."""
    found, fenced = set(), False
    for number, line in enumerate(lines, 1):
        fenced ^= line.lstrip().startswith("```")
        if fenced or line.startswith(("    ", "|")):
            found.add(number)
    return found


CHECKS: tuple[Callable[[Tree], Iterator[Finding]], ...] = (order, circles, names, functions, columns)


def main(argv: list[str]) -> int:
    tree = Tree(Path(argv[1]) if len(argv) > 1 else Path(__file__).parents[1])
    found = [str(finding) for check in CHECKS for finding in check(tree)] + house_c.problems(tree.root)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

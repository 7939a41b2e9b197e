"""Functions of other modules that launch for a stub, a library's own launchers, as their files have them.

A backward part holds copies of them, with what they take from their modules imported. Word for word those
are the forward's, as copies of the user's own functions are. Files are read, and nothing of them runs.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..source import tree_nodes
from .elsewhere import Elsewhere
from .nameable import MODULES, Names, stored_in

_STEPS_MAX = 16  # a name that is imported from a module that imports it, and so on
_SKIPPED = MODULES | {"kernel_agent", "numpy"} | set(sys.stdlib_module_names)


@dataclass(frozen=True, eq=False)
class _Module:
    """A module's text; `package` is what its relative imports begin at, `name` is "" for the scanned file."""

    name: str
    package: str
    tree: ast.Module
    names: Names = field(repr=False)

    def defined(self, name: str) -> list[ast.stmt]:
        return [n for n in self.tree.body if getattr(n, "name", None) == name]

    def applied(self, name: str) -> ast.expr | None:
        """The Function of `name = Function.apply`."""
        for node in self.tree.body:
            match node:
                case ast.Assign([ast.Name(target)], ast.Attribute(owner, "apply")) if target == name:
                    return owner
        return None

    @cached_property
    def bound(self) -> set[str]:
        """What it defines or assigns itself."""
        return {getattr(n, "name", "") for n in self.tree.body} | stored_in([*self.tree.body])


class Borrowed:
    """What functions of a file reach of other modules' launchers. `modules`: where those are, and what they
    take from others, each with the names that they read."""

    def __init__(
        self, tree: ast.Module, names: Names, roots: Iterable[ast.FunctionDef], around: Elsewhere | None
    ) -> None:
        self.around = around
        self.own = _Module("", around.package if around is not None else "", tree, names)
        self.modules: dict[str, set[str]] = {}
        self._texts = set[str]()
        found: dict[str, tuple[_Module, ast.FunctionDef, set[str]]] = {}
        todo = list(self._called(self.own, roots))
        while todo:
            path = todo.pop()
            if path in found:
                continue
            known = self._function(path)
            if known is not None:
                calls = set(self._called(known[0], [known[1]]))
                found[path] = *known, calls
                todo += calls
        launching = {
            path for path, (_, function, _) in found.items() if any(map(_is_launch, tree_nodes(function)))
        }
        while more := {p for p, (_, _, calls) in found.items() if calls & launching} - launching:
            launching |= more
        for path in launching:
            module, function, _ = found[path]
            nodes = [n for n in tree_nodes(function) if isinstance(n, ast.expr)]
            self._texts |= {self._written(n, module) for n in nodes}
            read = self.modules.setdefault(module.name, set())
            read |= {n.id for n in nodes if isinstance(n, ast.Name)}
            for path in filter(None, (self._path(n, module) for n in nodes)):
                home, _, name = path.rpartition(".")
                if self._module(home) is not None:
                    self.modules.setdefault(home, set()).add(name)
            read |= {n.id for b in _bases(module, function) for n in tree_nodes(b) if isinstance(n, ast.Name)}

    def has(self, node: ast.expr) -> bool:
        """Whether an expression of the file stands in such a function, word for word but for what the file
        calls the names of other modules."""
        return bool(self._texts) and self._written(node, self.own) in self._texts

    def may_import(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Whether an import takes nothing but what such functions have."""
        if isinstance(node, ast.Import):
            return all(alias.name in self.modules for alias in node.names)
        read = self.modules.get(node.module or "", set()) if not node.level else set()
        return all(alias.name in read for alias in node.names)

    def _called(self, module: _Module, functions: Iterable[ast.FunctionDef]) -> Iterator[str]:
        for function in functions:
            for node in tree_nodes(function):
                if isinstance(node, ast.Call) and (path := self._path(node.func, module)) is not None:
                    yield path.removesuffix(".apply")

    def _function(self, path: str) -> tuple[_Module, ast.FunctionDef] | None:
        """The one function of a name, or the forward of the one class."""
        home, _, name = path.rpartition(".")
        module = self._module(home)
        defined = module.defined(name) if module is not None else []
        if module is None or len(defined) != 1:
            return None
        (node,) = defined
        if isinstance(node, ast.ClassDef):
            forwards = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "forward"]
            return (module, forwards[0]) if len(forwards) == 1 else None
        return (module, node) if isinstance(node, ast.FunctionDef) else None

    def _written(self, node: Any, module: _Module) -> str:
        """A syntax tree as a text, in which names of modules are written out."""
        if isinstance(node, (ast.Name, ast.Attribute)) and (path := self._path(node, module)) is not None:
            return path
        if isinstance(node, ast.AST):
            parts = [
                self._written(v, module) for name, v in ast.iter_fields(node) if name not in ("ctx", "kind")
            ]
            return f"{type(node).__name__}({', '.join(parts)})"
        if isinstance(node, list):
            return f"[{', '.join(self._written(one, module) for one in node)}]"
        return repr(node)

    def _path(self, node: ast.AST, module: _Module) -> str | None:
        """Where what a chain of attributes stands for is defined, as a dotted name."""
        path = module.names.path(node)
        if path is not None:
            path = _absolute(path, module)
        elif module.name:
            root: ast.AST = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root not in module.names.hidden and root.id in module.bound:
                path = f"{module.name}.{ast.unparse(node)}"
        return self._origin(path) if path else None

    def _origin(self, path: str) -> str:
        """A dotted name, with what a module imports from another followed to there."""
        for _ in range(_STEPS_MAX):
            parts = path.split(".")
            if parts[0] in _SKIPPED:
                return path
            at = next((i for i in range(len(parts) - 1, 0, -1) if self._module(".".join(parts[:i]))), 0)
            module = self._module(".".join(parts[:at]))
            if module is None or module.defined(parts[at]):
                return path
            if (applied := module.applied(parts[at])) is not None:
                return self._origin(f"{self._path(applied, module) or path}.apply")
            imported = module.names.imported.get(parts[at])
            if imported is None or parts[at] in module.bound:
                return path
            path = ".".join([_absolute(imported, module), *parts[at + 1 :]])
        return path

    @cache  # noqa: B019 (lives as long as the scan)
    def _module(self, name: str) -> _Module | None:
        parts = name.split(".")
        if not all(part.isidentifier() for part in parts) or parts[0] in _SKIPPED:
            return None
        copies = [self.around.folder] if self.around is not None else []
        for folder in [*map(Path, sys.path), *copies]:  # as they are imported
            file, package = folder.joinpath(*parts).with_suffix(".py"), ".".join(parts[:-1])
            if not file.is_file():
                file, package = folder.joinpath(*parts, "__init__.py"), name
            if file.is_file():
                try:
                    tree = ast.parse(file.read_text(encoding="utf-8"))
                except (OSError, SyntaxError, ValueError):
                    return None
                return _Module(name, package, tree, Names(tree))
        return None


def _absolute(path: str, module: _Module) -> str:
    """A dotted name as an import of a module spells it, from the top; "." and more where it leaves that."""
    plain = path.lstrip(".")
    level = len(path) - len(plain)
    around = module.package.split(".") if module.package else []
    if level == 0 or level > len(around):
        return path
    return ".".join([*around[: len(around) - level + 1], plain])


def _is_launch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)


def _bases(module: _Module, function: ast.FunctionDef) -> list[ast.expr]:
    return [
        base
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and function in node.body
        for base in node.bases
    ]

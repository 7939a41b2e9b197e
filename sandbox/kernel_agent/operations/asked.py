"""Questions of a module that people wrote themselves about what it runs on: which package is installed, in
which version, and what a driver says of a device.

Libraries put them between a stub and its launches. What is answered is True or False, a number, a text or a
version, and nothing can be reached from there: only whole calls are known, with the arguments that keep them
so. Reads syntax trees only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..source import tree_nodes
from .nameable import Names, allowed, imported

# No dots: of "a.b" the package a is imported.
_SPEC = "importlib.util.find_spec"
_VERSION_OF = "importlib.metadata.version"
_MISSING = frozenset({"importlib.metadata.PackageNotFoundError", "packaging.version.InvalidVersion"})
_VERSIONS = frozenset({"packaging.version.Version", "packaging.version.parse"})
_PLAIN = frozenset(
    f"transformers.utils.{where}is_torch_{device}_available"
    for where in ("", "import_utils.")
    for device in ("npu", "xpu")
)
# What leads to a driver's answers and to more: a name for it is read where each use of the name is allowed.
_HOLDERS = frozenset({"triton.runtime.driver.active", "triton.runtime.driver.active.utils"})
_MODULES = frozenset({"importlib.util", "importlib.metadata", "packaging.version"})
_OWN_LIBRARY = "importlib"


class Asked:
    """Of one module. `nodes`: names and chains of attributes that such a question consists of."""

    def __init__(self, tree: ast.Module, names: Names, folder: Path | None) -> None:
        """`folder`: the user's modules, of which none may have the name of a package that is asked."""
        self.names, self.folder = names, folder
        self.nodes: set[ast.AST] = set()
        for node in tree_nodes(tree):
            for chain in self._questions(node):
                self.nodes |= {n for n in tree_nodes(chain) if isinstance(n, (ast.Name, ast.Attribute))}
        for function in (n for n in tree_nodes(tree) if isinstance(n, ast.FunctionDef)):
            self.nodes |= set(self._held(function))

    def may_import(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Whether an import takes nothing but what such questions are asked of: uses are judged by
        themselves."""
        known = _MODULES | _MISSING | _VERSIONS | _PLAIN | {_SPEC, _VERSION_OF}
        return all(path in known and not self._is_users(path) for path in imported(node))

    def _questions(self, node: ast.AST) -> Iterator[ast.expr]:
        """What is called, or caught, of a question that the node is."""
        match node:
            case ast.Call(func, [ast.Constant(str())], []) if self._path(func) == _VERSION_OF:
                yield func
            case ast.Call(func, [argument], []) if self._path(func) in _VERSIONS:
                if not isinstance(argument, ast.Starred):
                    yield func
            case ast.Call(func, [], []) if self._path(func) in _PLAIN:
                yield func
            case ast.Compare(
                ast.Call(func, [ast.Constant(str(name))], []), [ast.Is() | ast.IsNot()], [ast.Constant(None)]
            ) if self._path(func) == _SPEC and "." not in name:
                yield func
            case ast.ExceptHandler(type=ast.expr() as caught):
                classes = caught.elts if isinstance(caught, ast.Tuple) else [caught]
                yield from (one for one in classes if self._path(one) in _MISSING)

    def _path(self, node: ast.expr) -> str | None:
        path, root = self.names.path(node), node
        while isinstance(root, ast.Attribute):
            root = root.value
        several = isinstance(root, ast.Name) and root.id in self.names.several
        return None if path is None or several or self._is_users(path) else path

    def _is_users(self, path: str) -> bool:
        """Whether one of the user's modules would be found under that name."""
        root = path.split(".")[0]
        if self.folder is None or root == _OWN_LIBRARY:
            return False
        return (self.folder / root).exists() or (self.folder / f"{root}.py").exists()

    def _held(self, function: ast.FunctionDef) -> Iterator[ast.AST]:
        """`utils = triton.runtime.driver.active.utils`, where nothing is done with the name but to read what
        the lists have of it."""
        inside = list(tree_nodes(function))
        declared = {name for n in inside if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
        given = {arg.arg for arg in inside if isinstance(arg, ast.arg)}
        for node in inside:
            match node:
                case ast.Assign([ast.Name(name)], value) if (path := self._path(value)) in _HOLDERS:
                    uses = [n for n in inside if isinstance(n, ast.Name) and n.id == name]
                    stores = [n for n in uses if not isinstance(n.ctx, ast.Load)]
                    if len(stores) == 1 and name not in declared | given and _only_reads(inside, uses, path):
                        yield value


def _only_reads(inside: Iterable[ast.AST], uses: list[ast.Name], path: str | None) -> bool:
    """Whether each use of a name but the first is a read of an attribute that may be named of the path."""
    read = {n.value for n in inside if isinstance(n, ast.Attribute) and allowed(f"{path}.{n.attr}")}
    return all(use in read for use in uses if isinstance(use.ctx, ast.Load))

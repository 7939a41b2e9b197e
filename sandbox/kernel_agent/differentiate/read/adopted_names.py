"""Names of other modules in functions that are read as the user's: which those are, and what they are called
beside the user's own."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import symtable
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ...forward import Forward
from ...launches import jit_function
from ...source import tree_nodes
from .trace import CALLED, OURS

# Modules that are imported by their own names; others are taken from where a function has them.
_PLAIN = ("torch", "triton", "triton.language", "math", "torch.nn.functional")
_OF_ITS_PLACE = {"globals", "locals", "vars", "eval", "exec", "dir", "super", "__import__"}
_MADE_ANEW = (
    ast.Call, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda,
)  # fmt: skip


class Unclear(Exception):
    """A function cannot be read in another file for certain; the text is the end of a sentence."""


def bound_in(node: ast.AST) -> set[str]:
    """Names that a function, or something within it, has of its own."""
    found = {n.arg for n in tree_nodes(node) if isinstance(n, ast.arg)}
    for one in tree_nodes(node):
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load):
            found.add(one.id)
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and one is not node:
            found.add(one.name)
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            found |= {(a.asname or a.name).split(".")[0] for a in one.names}
        elif isinstance(one, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and one.name:
            found.add(one.name)
    return found


def globals_of(node: ast.FunctionDef) -> set[str]:
    """The names of its module that a function reads, with its decorators and defaults. Raises Unclear where
    its text would mean something else in another file."""
    bare = copy.deepcopy(node)
    bare.decorator_list = []
    for one in tree_nodes(bare):
        if isinstance(one, ast.arg):
            one.annotation = None
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
            one.returns = None
        elif isinstance(one, ast.AnnAssign):
            one.annotation = ast.Constant(None)
        elif isinstance(one, ast.ImportFrom) and one.level:
            raise Unclear(f"{node.name} imports from its package")
    defaults = [*bare.args.defaults, *(d for d in bare.args.kw_defaults if d is not None)]
    if any(isinstance(part, _MADE_ANEW) for one in defaults for part in tree_nodes(one)):
        raise Unclear(f"{node.name} has a default that is made when it is defined")
    outside = {
        n.id for one in (*node.decorator_list, *defaults) for n in tree_nodes(one) if isinstance(n, ast.Name)
    }
    try:
        table = symtable.symtable(ast.unparse(bare), "<function>", "exec").get_children()[0]
    except (SyntaxError, ValueError) as error:
        raise Unclear(f"{node.name} cannot be parsed alone") from error
    read, own, todo = set[str](), bound_in(bare), [table]
    while todo:
        scope = todo.pop()
        todo += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_declared_global():
                raise Unclear(f"{node.name} sets {symbol.get_name()} of its module")
            if symbol.is_global():
                read.add(symbol.get_name())
    read |= outside
    if both := sorted(read & own):
        raise Unclear(f"`{both[0]}` is a variable of {node.name} and a name of its module")
    if odd := sorted(n for n in read if n in _OF_ITS_PLACE or n.startswith("__")):
        raise Unclear(f"{node.name} uses {odd[0]}")
    return read


class Imports:
    """What functions of other modules take from there, with names that are free in the user's file."""

    def __init__(self, fwd: Forward) -> None:
        self.names = dict(vars(fwd.module))  # those of the user's file
        self.imported = {
            alias.asname or alias.name
            for node in fwd.tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        self.bound = set[str]()  # variables of the functions that the names stand in
        self.set_anew = _set_from_outside(fwd.tree)
        self.made: dict[str, tuple[str, str | None]] = {}  # name: the module, and its name there
        self.keys = set[str]()  # of the functions themselves

    def seen(self, tree: ast.Module) -> None:
        """A module whose functions are read."""
        self.set_anew |= _set_from_outside(tree)
        self.set_anew |= {n for one in tree_nodes(tree) if isinstance(one, ast.Global) for n in one.names}

    def free(self, wanted: str) -> str:
        """A name like this one that nothing else has."""
        while (
            wanted in self.names
            or wanted in self.made
            or wanted in self.bound | self.keys | OURS | CALLED
            or hasattr(builtins, wanted)
        ):
            wanted += "_"
        return wanted

    def spelled(self, module: ModuleType, name: str) -> str:
        """What a name of a module is in the user's file. Functions, classes and kernels are imported; data
        stays the module's, which may set it anew. Raises Unclear."""
        known = vars(module)
        if name not in known and hasattr(builtins, name):
            if name in self.names:
                raise Unclear(f"`{name}` has another meaning in the user's file")
            return name
        value = known.get(name)
        if isinstance(value, ModuleType) and name not in self.set_anew:
            return self._module(module, name, value)
        if callable(value) or jit_function(value) is not None:
            if name not in self.set_anew:
                return self._taken(module, name)
            if jit_function(value) is not None:
                raise Unclear(f"{name} is set anew")
        return f"{self._whole(module, name)}.{name}"

    def _module(self, module: ModuleType, name: str, value: ModuleType) -> str:
        if self.names.get(name) is value:
            return name
        if value.__name__ not in _PLAIN or self.free(name) != name and name not in self.made:
            return self._taken(module, name)
        known = self.made.setdefault(name, (value.__name__, None))
        return name if known == (value.__name__, None) else self._taken(module, name)

    def _taken(self, module: ModuleType, name: str) -> str:
        """A name that `from module import name` binds."""
        if self.names.get(name) is vars(module)[name] and name in self.imported:
            return name
        value = vars(module)[name]
        for made, (where, there) in self.made.items():
            if there is not None and vars(sys.modules[where])[there] is value:
                return made
        made = self.free(name)
        self.made[made] = _importable(module), name
        return made

    def _whole(self, module: ModuleType, wanted: str) -> str:
        """A name for the module itself."""
        whole = _importable(module)
        known = next((name for name, one in self.made.items() if one == (whole, None)), None)
        if known is None:
            root, *parts = whole.split(".")
            if (
                functools.reduce(lambda at, part: getattr(at, part, None), parts, sys.modules.get(root))
                is not module
            ):
                raise Unclear(f"{wanted} of {whole} cannot be reached: its package has another {whole}")
            known = self.free(f"_{whole.rpartition('.')[2]}")
            self.made[known] = whole, None
        return known

    def statements(self, used: Iterable[str]) -> list[str]:
        """Import statements for the names that are used."""
        lines, of = list[str](), dict[str, list[str]]()
        for name, (module, there) in sorted(self.made.items()):
            if name not in used:
                continue
            if there is None:
                lines.append(f"import {module}" + f" as {name}" * (name != module))
            else:
                of.setdefault(module, []).append(there + f" as {name}" * (name != there))
        return lines + [f"from {module} import {', '.join(names)}" for module, names in sorted(of.items())]


def _importable(module: ModuleType) -> str:
    if sys.modules.get(module.__name__) is not module:
        raise Unclear(f"{module.__name__} is no module that can be imported")
    return module.__name__


def _set_from_outside(tree: ast.Module) -> set[str]:
    """Attributes that the text of a module sets: of other modules, perhaps."""
    return {
        n.attr for n in tree_nodes(tree) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)
    }


def same(a: Any, b: Any) -> bool:
    """Whether two objects are what one definition makes."""
    return type(a) is type(b) and getattr(a, "__code__", None) is getattr(b, "__code__", None)

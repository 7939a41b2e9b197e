"""Which functions of other modules stand between the stub and a launch."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...forward import Forward
from ...launches import jit_function
from ...source import tree_nodes
from .adopted_names import bound_in
from .host_functions import HostFunctions

SKIPPED = {"torch", "triton", "numpy", "kernel_agent"} | set(sys.stdlib_module_names)


@dataclass(eq=False)
class Found:
    """A function of another module, or the forward of a Function there, and what it calls."""

    name: str  # in its module: of the function, or of the class
    value: Any
    module: ModuleType
    path: str
    source: str
    tree: ast.Module
    node: ast.FunctionDef
    owner: ast.ClassDef | None
    via: int  # the line of the user's file that leads to it
    launches: bool = False
    calls: list[tuple[ast.expr, Found]] = field(default_factory=list)
    handed: bool = False  # something other than a call has it
    dropped: bool = False  # a decorator is left out
    key: str = ""  # its name beside the user's functions

    @property
    def lines(self) -> range:
        first = min([self.node.lineno, *(one.lineno for one in self.node.decorator_list)])
        return range(first, (self.node.end_lineno or first) + 1)


class Search:
    """From the stub of a file into the modules that it calls. Nothing runs."""

    def __init__(self, fwd: Forward) -> None:
        self.fwd = fwd
        self.own_calls: list[tuple[ast.FunctionDef, ast.expr, Found]] = []
        self.problems: list[tuple[str, range, str]] = []
        self._found: dict[int, Found | None] = {}
        self._modules: dict[str, tuple[str, ast.Module] | None] = {}
        self._values: dict[int, list[Found]] = {}

    def needed(self) -> list[Found]:
        """Those that launch, or call one that does, in the order in which they are reached."""
        own = HostFunctions(self.fwd.tree)
        reached, todo = set[str](), [self.fwd.stub_name]
        while todo:
            name = todo.pop()
            if name in reached or name not in own.by_name:
                continue
            reached.add(name)
            function = own.by_name[name]
            todo += [called for node in tree_nodes(function) if (called := own.called(node))]
            for call, value in self._called(function, vars(self.fwd.module)):
                if own.called(call) in own.by_name:
                    continue
                found = self._find(value, _last(call.func), call.func.lineno)
                if found is not None:
                    self.own_calls.append((function, call.func, found))
        every = [one for one in self._found.values() if one is not None]
        needed = [one for one in every if one.launches]
        while more := [o for o in every if o not in needed and any(c in needed for _, c in o.calls)]:
            needed += more
        for name in reached:
            self._note_handed(own.by_name[name], vars(self.fwd.module), needed)
        for one in needed:
            self._note_handed(one.node, vars(one.module), needed)
        return [one for one in every if one in needed]

    def _called(self, function: ast.FunctionDef, names: dict[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
        """The calls of what is known outside of a function, each with that."""
        bound = bound_in(function)
        for node in tree_nodes(function):
            if isinstance(node, ast.Call):
                value = resolved(node.func, names, bound)
                value = _of_apply(value)
                if value is not None and jit_function(value) is None:
                    yield node, value

    def _find(self, value: Any, called: str, via: int) -> Found | None:
        """Where a function, or a Function, is defined, with all that it calls; None for what is not read."""
        if id(value) not in self._found:
            self._found[id(value)] = None
            found = self._defined(value, called, via)
            if found is not None:
                self._found[id(value)] = found
                names, bound = vars(found.module), bound_in(found.node)
                found.launches = any(_is_launch(node, names, bound) for node in tree_nodes(found.node))
                for call, inner in self._called(found.node, names):
                    if (one := self._find(inner, _last(call.func), via)) is not None:
                        found.calls.append((call.func, one))
        return self._found[id(value)]

    def _defined(self, value: Any, called: str, via: int) -> Found | None:
        """The definition at the top level of a module, which binds the name once and for all."""
        if _is_skipped(getattr(value, "__module__", "") or "."):
            return None
        plain = value if isinstance(value, type) else inspect.unwrap(value) if callable(value) else None
        home, name = getattr(plain, "__module__", None), getattr(plain, "__name__", None)
        places = [(sys.modules.get(home), name)] if isinstance(home, str) and isinstance(name, str) else []
        if not any(module is not None and vars(module).get(name) is value for module, name in places):
            # A decorator has left it no name of its own.
            places = [(one, called) for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
        for module, name in places:
            if module is None or _is_skipped(module.__name__) or vars(module).get(name) is not value:
                continue
            read = self._read(module)
            if read is None:
                continue
            source, tree = read
            defined = [n for n in tree.body if getattr(n, "name", None) == name]
            if len(defined) != 1 or _bindings(tree, name) != 1:
                continue
            path = str(Path(module.__file__ or "").resolve())
            given = name, value, module, path, source, tree
            if isinstance(defined[0], ast.FunctionDef):
                return Found(*given, defined[0], None, via)
            forwards = [n for n in getattr(defined[0], "body", ()) if getattr(n, "name", "") == "forward"]
            if _is_function(value) and len(forwards) == 1 and isinstance(forwards[0], ast.FunctionDef):
                return Found(*given, forwards[0], defined[0], via)  # type: ignore[arg-type]
        return None

    def _read(self, module: ModuleType) -> tuple[str, ast.Module] | None:
        """The text of a module, and its tree."""
        if module.__name__ not in self._modules:
            file, read = getattr(module, "__file__", None) or "", None
            if file.endswith(".py") and str(Path(file).resolve()) != self.fwd.path:
                try:
                    source = Path(file).read_text(encoding="utf-8")
                    read = source, ast.parse(source)
                except (OSError, SyntaxError, ValueError):
                    read = None
            self._modules[module.__name__] = read
        return self._modules[module.__name__]

    def _note_handed(self, function: ast.FunctionDef, names: dict[str, Any], needed: list[Found]) -> None:
        """Note which functions stand in a text as values: who gets one calls it where it is."""
        bound = bound_in(function)
        callees = {id(node.func) for node in tree_nodes(function) if isinstance(node, ast.Call)}
        applied = {
            id(n.value) for n in tree_nodes(function) if id(n) in callees and isinstance(n, ast.Attribute)
        }
        by_value = {id(one.value): one for one in needed}
        for node in tree_nodes(function):
            if isinstance(node, (ast.Name, ast.Attribute)) and id(node) not in callees | applied:
                value = _of_apply(resolved(node, names, bound))
                if id(value) in by_value:
                    by_value[id(value)].handed = True


def resolved(expression: ast.expr, names: dict[str, Any], bound: set[str]) -> Any:
    """What a name of a module stands for, or an attribute of a module; None for anything else."""
    if isinstance(expression, ast.Name) and expression.id not in bound:
        return names.get(expression.id)
    if isinstance(expression, ast.Attribute):
        owner = resolved(expression.value, names, bound)
        if isinstance(owner, ModuleType):
            return vars(owner).get(expression.attr)
        if _is_function(owner) and expression.attr == "apply":
            return owner.apply
    return None


def _of_apply(value: Any) -> Any:
    """The Function of an `apply`; a class that is called makes an object, which is not read."""
    owner = getattr(value, "__self__", None)
    if _is_function(owner) and getattr(value, "__name__", "") == "apply":
        return owner
    return None if isinstance(value, type) else value


def _is_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _is_launch(node: ast.AST, names: dict[str, Any], bound: set[str]) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
        return False
    value = resolved(node.func.value, names, bound)
    return value is None or jit_function(value) is not None


def _last(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def _is_skipped(name: Any) -> bool:
    return not isinstance(name, str) or name.partition(".")[0] in SKIPPED


def _bindings(tree: ast.Module, name: str) -> int:
    """How often a module's text binds a name, wherever that is not a function's own variable."""
    count, todo = 0, list[ast.AST](tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            count += node.name == name
            count += sum(name in g.names for g in tree_nodes(node) if isinstance(g, ast.Global))
            continue
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            count += 1
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            count += sum((alias.asname or alias.name).split(".")[0] == name for alias in node.names)
        todo += ast.iter_child_nodes(node)
    return count

"""Launches that no traced call has made, where a draft would make them without their gradient.

A draft copies the functions that launch and calls the copies by their names; a launch in the copies that
was not traced raises. What is reached otherwise (a kernel in a variable, a method, a bound launch, a
function that is handed on) would run as it stands: outside of a branch that was traced nobody would see
that its gradient is left out. So a draft is refused where the text has such a way to a launch.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ...forward import Forward
from ...launches import jit_function
from ...operations.nameable import stored_in
from ...source import tree_nodes
from ..ir.refusal import Refusal
from .adopted_search import Search, resolved
from .host_functions import HostFunctions

_OBJECTS = 20_000
_REMEDY = "Write name[grid](...) with the kernel's name there, in a function that is called by its name."
_Text = ast.FunctionDef | ast.Lambda


def check(fwd: Forward, known: Iterable[ast.Call]) -> None:
    """Refuse a stub that may reach a launch which is none of `known`, in a way that a draft cannot follow."""
    _Ways(fwd, set(known)).check()


class _Ways:
    def __init__(self, fwd: Forward, known: set[ast.Call]) -> None:
        self.fwd, self.known = fwd, known
        self.hosts = HostFunctions(fwd.tree)
        self.names = vars(fwd.module)
        self.texts = {
            (node.lineno, isinstance(node, ast.Lambda)): node
            for node in tree_nodes(fwd.tree)
            if isinstance(node, (ast.FunctionDef, ast.Lambda))
        }
        self.seen = dict[int, Any]()  # by id, and kept, so that no other object takes it

    def check(self) -> None:
        reached, rest = set[str](), [self.fwd.stub_name]
        while rest:
            name = rest.pop()
            if name in self.hosts.by_name and name not in reached and not self._is_kernel(name):
                reached.add(name)
                text = self.hosts.by_name[name]
                named = {n.id for n in tree_nodes(text) if isinstance(n, ast.Name)} - _own(text)
                rest += [self.hosts.named(one) for one in sorted(named)]
        for name in sorted(reached, key=lambda one: self.hosts.by_name[one].lineno):
            for node, what in self._of_text(self.hosts.by_name[name], copied=True):
                raise Refusal("launch", f"{what}, and a draft cannot follow it there", _REMEDY).at(node)
        for one in Search(self.fwd).needed():
            message = f"{one.name} of {Path(one.path).name} may launch a kernel, and stays in its module"
            raise Refusal("launch", message, "Launch the kernel in this file.", one.via, file=self.fwd.path)

    def _is_kernel(self, name: str) -> bool:
        return jit_function(self.names.get(name)) is not None

    @functools.cached_property
    def launching(self) -> set[str]:
        """Functions that launch, or call or name one that does."""
        texts = {name: text for name, text in self.hosts.by_name.items() if not self._is_kernel(name)}
        found = {name for name, text in texts.items() if any(map(self._is_launch, tree_nodes(text)))}
        named = {
            name: {self.hosts.named(n.id) for n in tree_nodes(text) if isinstance(n, ast.Name)}
            for name, text in texts.items()
        }
        while more := {name for name, inside in named.items() if inside & found} - found:
            found |= more
        return found

    def _is_launch(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
            return False
        value = resolved(node.func.value, self.names, set())
        return value is None or jit_function(value) is not None

    def _of_text(self, text: _Text, copied: bool) -> Iterator[tuple[ast.AST, str]]:
        """Ways to a launch in a function's text, each with words for it. `copied`: what it calls by name is
        called as a copy is."""
        body = text.body if isinstance(text.body, list) else [text.body]
        within = [node for part in body for node in tree_nodes(part)]
        bound = _own(text)
        above: dict[int, ast.AST] = {id(c): n for n in within for c in ast.iter_child_nodes(n)}
        spared = self._launched_alone(within) if copied else set[int]()
        for node in within:
            if id(node) in spared:
                continue
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                yield from self._of_call(node, bound, copied)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                value = resolved(node, self.names, bound)
                yield from self._of_name(node, value, above, copied)

    def _launched_alone(self, within: list[ast.AST]) -> set[int]:
        """What variables are assigned of which nothing is used but known launches: these have the launcher by
        a name of the top level (launchers.hoist)."""
        named = [n for n in within if isinstance(n, ast.Name)]
        shared = {name for n in within if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
        launched = {id(call.func.value) for call in self.known}  # type: ignore[attr-defined]
        found = set[int]()
        for node in within:
            match node:
                case ast.Assign([ast.Name(name)], value) if name not in shared:
                    uses = [n for n in named if n.id == name and n is not node.targets[0]]
                    if all(id(n) in launched for n in uses):
                        found |= {id(part) for part in tree_nodes(value)}
        return found

    def _of_call(self, call: ast.Call, bound: set[str], copied: bool) -> Iterator[tuple[ast.AST, str]]:
        """Of `name[...](...)`."""
        kernel = call.func.value  # type: ignore[attr-defined]
        value = resolved(kernel, self.names, bound)
        if copied and call in self.known:
            return
        # An object's own members are looked through themselves.
        if not copied and isinstance(kernel, ast.Attribute) and _is_name(kernel.value, "self"):
            return
        if value is None:
            yield call, f"`{ast.unparse(kernel)}[...](...)` may launch a kernel that has no name there"
        elif jit_function(value) is not None:
            yield call, f"{ast.unparse(kernel)} is launched in a way that no call has shown"

    def _of_name(
        self, node: ast.Name | ast.Attribute, value: Any, above: dict[int, ast.AST], copied: bool
    ) -> Iterator[tuple[ast.AST, str]]:
        """Of a name, or an attribute of a module, that stands for a value."""
        if value is None:
            return
        text, user = ast.unparse(node), above.get(id(node))
        if jit_function(value) is not None:
            calls = isinstance(user, ast.Subscript) and isinstance(above.get(id(user)), ast.Call)
            calls = calls and above[id(user)].func is user  # type: ignore[union-attr, attr-defined]
            reads = isinstance(user, ast.Attribute) and user.attr != "run"
            raises = isinstance(user, ast.Call) and user.func is node
            if not (calls or reads or raises):
                yield node, f"{text} is launched by other means than {text}[grid](...)"
            return
        name = self.hosts.named(text)
        if name in self.hosts.by_name:
            holder = above.get(id(user)) if isinstance(user, ast.Attribute) and user.attr == "apply" else user
            by_name = isinstance(holder, ast.Call) and self.hosts.called(holder) == name
            by_name = by_name and node not in [*holder.args, *(k.value for k in holder.keywords)]  # type: ignore[union-attr, attr-defined]
            if name in self.launching and not (copied and by_name):
                yield node, f"{text} launches, and is not called by its name here"
        elif (what := self._of_value(value)) is not None:
            yield node, f"{text} leads to a launch{what}"

    def _of_value(self, value: Any) -> str | None:
        """Whether an object leads to a launch: None, or where that stands, as the end of a sentence."""
        todo = [value]
        while todo:
            part = todo.pop()
            if isinstance(part, (ast.FunctionDef, ast.Lambda)):
                for node, what in self._of_text(part, copied=False):
                    return f" (line {node.lineno}: {what})"  # type: ignore[attr-defined]
            elif jit_function(part) is not None:
                return ""
            elif id(part) not in self.seen:
                self.seen[id(part)] = part
                todo += self._parts(part)
            if len(self.seen) > _OBJECTS:
                return ", perhaps: it leads to too many objects to tell"
        return None

    def _parts(self, value: Any) -> Iterable[Any]:
        """What an object's calls may run: texts of the file, and other objects."""
        if isinstance(value, FunctionType):
            code = value.__code__
            own = code.co_filename == self.fwd.path
            text = self.texts.get((code.co_firstlineno, code.co_name == "<lambda>"))
            text = text or self._decorated(code.co_firstlineno)
            return [
                *([text] if own and text is not None else []),
                *(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)),
                *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values(),
                getattr(value, "__wrapped__", None),
            ]
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, (staticmethod, classmethod)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, dict):
            return value.values()
        if isinstance(value, (list, tuple, set, frozenset)):
            return value
        kind = value if isinstance(value, type) else type(value)
        classes = [c for c in kind.__mro__ if c.__module__ == self.fwd.module.__name__]
        if isinstance(value, type):
            classes = [c for c in classes if not issubclass(c, torch.autograd.Function)]
            return [part for one in classes for part in vars(one).values()]
        if isinstance(value, (ModuleType, torch.Tensor)):
            return []
        slots = [name for one in kind.__mro__ for name in _names(vars(one).get("__slots__", ()))]
        held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
        return [kind, *held, getattr(value, "__wrapped__", None)]

    def _decorated(self, line: int) -> _Text | None:
        """The function whose decorators begin in a line."""
        return next(
            (
                node
                for node in tree_nodes(self.fwd.tree)
                if isinstance(node, ast.FunctionDef)
                and node.decorator_list
                and node.decorator_list[0].lineno == line
            ),
            None,
        )


def _own(text: _Text) -> set[str]:
    """The variables of a function's own scope: one further in hides nothing here."""
    body: list[ast.AST] = [*text.body] if isinstance(text.body, list) else [text.body]
    return {a.arg for a in tree_nodes(text.args) if isinstance(a, ast.arg)} | stored_in(body)


def _names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not sys
    except ValueError:
        return False

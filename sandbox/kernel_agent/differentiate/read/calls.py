"""Calls in a kernel: of triton.language, of methods, of helpers, whose text is inlined."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction

from ...source import tree_nodes
from ..ir.nodes import For, Node, Store, walk
from ..ir.refusal import Refusal
from ..ir.values import BlockPtr, DType, Either, Poison, Ptr, is_helper
from . import language, syntax_check
from .expressions import Expressions


class Calls(Expressions):
    """Interprets calls."""

    def _call(self, node: ast.Call) -> Any:
        before = len(self.effects)
        value = self._called(node)
        if isinstance(value, Node) and not self.depth and len(self.effects) == before:
            names = {n.id for n in tree_nodes(node) if isinstance(n, ast.Name)}
            self.called.append((node, value, {name: self.env.get(name) for name in names}))
        elif isinstance(value, Node) and not self.depth and self.g.here is self.g.top:
            loops = self.effects[before:]
            if all(isinstance(e, For) for e in loops) and not any(isinstance(e, Store) for e in walk(loops)):
                self.looped.setdefault(value, node)
        return value

    def _called(self, node: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Refusal("starred call", "starred arguments are not supported in a kernel").at(node)
        owner = self.expr(node.func.value) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, (bool, int, float)):  # what a kernel assigns is a tensor: `total = 0.0`
            owner = self.node(owner)
        method = isinstance(owner, (Node, Ptr, BlockPtr))
        function = None if method else self.expr(node.func)
        read = self.passed if is_helper(function) else self.expr
        args = [read(a) for a in node.args]
        keywords: dict = {k.arg: read(k.value) for k in node.keywords}
        if method:
            return language.method(self, owner, node.func.attr, args, keywords)  # type: ignore
        if isinstance(function, ConstexprFunction) and any(isinstance(a, DType) for a in args):
            return language.at_compile_time(function.fn, ast.unparse(node.func), args, keywords)
        helper = self.functions.get(getattr(function, "__name__", "")) if is_helper(function) else None
        if helper is not None and self.is_ours(function):
            with self.inside(node):
                return self.inline(helper, args, keywords)
        self.g.line = node.lineno
        imported = self.source_of(function, node.lineno) if is_helper(function) else None
        if imported is not None:
            with self.inside(node):
                return self.inline_imported(function, imported, args, keywords)
        if any(isinstance(value, Either) for value in (*args, *keywords.values())):
            args = [self.expr(a) for a in node.args]  # which refuses it
        return language.call(self, function, self._text_of(function, node.func), args, keywords)  # type: ignore[arg-type]

    @contextmanager
    def inside(self, call: ast.Call) -> Iterator[None]:
        """While a helper is interpreted, its names stand within the call of it."""
        around, self.within = self.within, (*self.within, (call.lineno, call.col_offset))
        try:
            yield
        finally:
            self.within = around

    def passed(self, node: ast.expr) -> Any:
        """An argument of a helper: what has a shape for each side of a flag is chosen where it is used."""
        value = self.env.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(value, Either) and isinstance(self.chosen(value, ""), Poison):
            return value
        return self.expr(node)

    def _text_of(self, function: Any, spelled: ast.expr) -> str:
        """How the generated code, which stands in the kernel's own file, calls a function of Triton."""
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", "") or ""
        if isinstance(self.module, ModuleType) and not self._renamed(function, spelled):
            return ast.unparse(spelled)
        if not home.startswith("triton.language"):
            return ast.unparse(spelled)
        if home.startswith("triton.language.extra."):
            return f"{self.tl}.extra.libdevice.{name}"
        return f"{self.tl}.{name}" if hasattr(tl, name) else f"{self.tl}.math.{name}"

    def _renamed(self, function: Any, spelled: ast.expr) -> bool:
        """Whether a function of triton.language is called by a name that another module gave it."""
        if isinstance(spelled, ast.Name):
            return getattr(tl, getattr(function, "__name__", ""), None) is function
        root = spelled
        while isinstance(root, ast.Attribute):
            root = root.value
        owner = vars(self.module).get(root.id) if isinstance(root, ast.Name) else None
        return isinstance(owner, ModuleType) and not owner.__name__.startswith("triton")

    def is_ours(self, function: Any) -> bool:
        """Whether a helper is one of the kernel's own file, and no namesake of one."""
        home = function.fn.__globals__.get("__name__")
        return isinstance(self.module, ModuleType) and home == vars(self.module).get("__name__")

    def source_of(self, function: Any, line: int) -> ast.FunctionDef | None:
        """A helper from another module, as if it stood on the line of its call; None for what is none, has a
        rule of its own, or no source that can be read."""
        if not hasattr(function, "fn") or getattr(function, "__name__", "") in language.USER_RULES:
            return None
        try:
            helper = ast.parse(textwrap.dedent(inspect.getsource(function.fn))).body[0]
        except (OSError, SyntaxError, TypeError):
            return None
        for node in tree_nodes(helper):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        return helper if isinstance(helper, ast.FunctionDef) else None

    def inline_imported(self, function: Any, helper: ast.FunctionDef, args: list, keywords: dict) -> Any:
        """The same as inline(), in the other module, whose names are the helper's."""
        outer = self.module
        self.module = SimpleNamespace(**function.fn.__globals__)
        try:
            return self.inline(helper, args, keywords)
        finally:
            self.module = outer

    def inline(self, helper: ast.FunctionDef, args: list, keywords: dict) -> Any:
        """Interpret a helper's body in its own scope."""
        if self.depth > 16:
            raise Refusal("recursion", f"`{helper.name}` calls itself")
        syntax_check.check(helper)
        names = [a.arg for a in helper.args.args]
        scope = dict(zip(names, args, strict=False))
        scope.update(keywords)
        for name, default in zip(reversed(names), reversed(helper.args.defaults), strict=False):
            if name not in scope:
                scope[name] = self.expr(default)
        missing = [name for name in names if name not in scope]
        if missing:
            raise Refusal("call", f"`{helper.name}` is called without {', '.join(missing)}")
        outer, self.env, line = self.env, scope, self.g.line
        self.depth += 1
        try:
            with self.g.at(self.g.here):
                done = self.block(helper.body)
        finally:
            self.env, self.g.line = outer, line
            self.depth -= 1
        return done.value if done is not None else None

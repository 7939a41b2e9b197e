"""Where a kernel is written: in the user's file, or in a module that it is imported from."""

from __future__ import annotations

import ast
import builtins
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from triton.runtime.autotuner import Heuristics

from ...forward import Forward
from ...launches import Launch, is_launcher
from ...source import tree_nodes
from ..ir.refusal import Refusal

KNOWN = ("triton", "math", "torch")  # modules that the generated section may import


@dataclass(frozen=True, eq=False)
class Home:
    """The file that a kernel is written in: the user's, or a module that it is imported from."""

    path: str
    lines: list[str]
    module: ModuleType | SimpleNamespace  # the names of the file; a SimpleNamespace where it is imported
    functions: dict[str, ast.FunctionDef]  # at its top level

    @property
    def imported(self) -> bool:
        return isinstance(self.module, SimpleNamespace)

    def heuristics(self, source: ast.FunctionDef) -> dict[str, ast.expr]:
        """The rules of @triton.heuristics on a kernel, as written, that the backward can have too: functions
        of the user's file, and lambdas of which it knows the names."""
        return {name: rule for name, rule in _heuristics(source).items() if self._is_known(rule)}

    def _is_known(self, rule: ast.expr) -> bool:
        if isinstance(rule, ast.Name):
            return not self.imported and rule.id in self.functions
        if not isinstance(rule, ast.Lambda) or len(rule.args.args) != 1:
            return False
        own = {a.arg for a in tree_nodes(rule) if isinstance(a, ast.arg)} | vars(builtins).keys()
        used = {n.id for n in tree_nodes(rule) if isinstance(n, ast.Name)} - own
        return not self.imported or all(self._is_module(name) for name in used)

    def _is_module(self, name: str) -> bool:
        value = vars(self.module).get(name)
        return isinstance(value, ModuleType) and name == value.__name__ and name in KNOWN


def rules_of(kernel: Any, name: str) -> dict[str, tuple[str, Callable[[dict], Any]]]:
    """The heuristics of a kernel called `name`: what holds each in the text, and the rule itself."""
    found: dict[str, tuple[str, Callable[[dict], Any]]] = {}
    while is_launcher(kernel):
        if isinstance(kernel, Heuristics):
            found |= {rule: (name, function) for rule, function in kernel.values.items()}
        kernel, name = kernel.fn, f"{name}.fn"
    return found


def asked_by(rule: Callable[[dict], Any], given: dict[str, Any]) -> set[str] | None:
    """The arguments that a heuristic names; None where it has others do that. Raises KeyError for one that
    is not given."""
    read: set[str] = set()

    class Given(dict):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    rule(Given(given))
    code = getattr(rule, "__code__", None)
    named = {one for one in (code.co_consts if code else ()) if isinstance(one, str)} & given.keys()
    return named if read <= named else None


def home_of(fwd: Forward, launch: Launch, functions: dict[str, ast.FunctionDef], call: ast.Call) -> Home:
    """The file of a launched kernel. The generated code stands in the user's."""
    path = launch.fn.__code__.co_filename
    if launch.globals is vars(fwd.module):
        return Home(fwd.path, fwd.source.splitlines(), fwd.module, functions)
    try:
        lines = linecache.getlines(path)
        tree = ast.parse("".join(lines))
    except SyntaxError:
        lines = []
    if not lines:
        message = f"the source of {launch.name}, {path}, cannot be read"
        raise Refusal("launch", message, "Define the kernel in this file.").at(call)
    found = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    names = SimpleNamespace(**launch.globals)
    return Home(path, [line.rstrip("\n") for line in lines], names, found)


def _heuristics(source: ast.FunctionDef) -> dict[str, ast.expr]:
    """The rules of @triton.heuristics on a kernel, as written."""
    found: dict[str, ast.expr] = {}
    for decorator in source.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("heuristics"):
            match [*decorator.args, *(k.value for k in decorator.keywords)]:
                case [ast.Dict(keys, values), *_]:
                    pairs = zip(keys, values, strict=True)
                    found |= {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
    return found

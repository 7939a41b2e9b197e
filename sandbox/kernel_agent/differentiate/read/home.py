"""Where a kernel is written: in the user's file, or in a module that it is imported from."""

from __future__ import annotations

import ast
import builtins
import linecache
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from ...forward import Forward
from ...launches import Launch
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

    def heuristics(self, source: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
        """The rules of @triton.heuristics on a kernel, as written. The backward, in the user's file, computes
        by them: those of an imported kernel are refused for names of its own module."""
        found = _heuristics(source)
        for name, rule in found.items() if self.imported else ():
            own = {a.arg for a in ast.walk(rule) if isinstance(a, ast.arg)} | vars(builtins).keys()
            used = {n.id for n in ast.walk(rule) if isinstance(n, ast.Name)} - own
            for one in sorted(used):
                value = vars(self.module).get(one)
                if not isinstance(value, ModuleType) or one != value.__name__ or one not in KNOWN:
                    message = f"the heuristic for `{name}` of {source.name} uses `{one}` of another module"
                    remedy = "Write it with triton, math and torch alone, or define the kernel in this file."
                    raise Refusal("heuristics", message, remedy).at(call)
        return found


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

"""The text of other modules' functions as it would stand in the user's file.

Each line of a body stays a line. Annotations are left out, and decorators of torch's, as they are in the
copies that the backward has; names of the module are what `Imports` calls them.
"""

from __future__ import annotations

import ast
import copy
import inspect
from types import ModuleType
from typing import Any

from ...launches import jit_function
from ...source import tree_nodes
from .adopted_names import Imports, Unclear, bound_in, globals_of
from .adopted_search import Found, resolved
from .host_functions import HostFunctions

Edit = tuple[int, int, str]  # of the bytes from one place to another
Call = tuple[ast.FunctionDef, ast.expr, Found]


class Lines:
    """A text of which parts are replaced."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[Edit] = []

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def begin(self, node: Any) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: Any) -> int:
        return self.at(node.end_lineno, node.end_col_offset)

    def replace(self, begin: int, end: int, text: str) -> None:
        """The lines stay as many."""
        self.leave_out(begin, end, text + "\\\n" * self.data.count(b"\n", begin, end))

    def leave_out(self, begin: int, end: int, text: str = "") -> None:
        self.edits.append((begin, end, text))

    def part(self, begin: int, end: int) -> str:
        """A part with its edits; of two that meet the outer one counts."""
        made, at = b"", begin
        for first, last, text in sorted(self.edits, key=lambda e: (e[0], -e[1])):
            if at <= first and last <= end:
                made += self.data[at:first] + text.encode()
                at = last
        return (made + self.data[at:end]).decode()


class Text:
    """The user's file with the functions of other modules that stand between its stub and launches.
    `functions`: those that can be read so; the others are told in `problems`, and stay where they are."""

    def __init__(
        self,
        own: ast.Module,
        imports: Imports,
        needed: list[Found],
        problems: list[tuple[str, range, str]],
    ) -> None:
        self.imports, self.problems = imports, problems
        self.own = {n.name for n in own.body if isinstance(n, ast.FunctionDef)}
        self.functions: list[Found] = []
        self.placed: list[tuple[Found, range]] = []
        self.begins = 0  # the line from which on the text is not the user's
        for function in [*HostFunctions(own).by_name.values(), *(one.node for one in needed)]:
            imports.bound |= bound_in(function)
        for one in needed:
            imports.seen(one.tree)
            try:
                _check(one)
                globals_of(one.node)
                self.functions.append(one)
            except Unclear as unclear:
                self._leave(one, unclear)

    def _leave(self, one: Found, unclear: Unclear) -> None:
        self.problems.append((one.path, one.lines, str(unclear)))
        if one in self.functions:
            self.functions.remove(one)

    def written(self, source: str, calls: list[Call]) -> tuple[str, set[str]]:
        """The whole text, and the user's functions that are changed in it. `calls`: those of the user's
        functions."""
        while True:
            self.imports.made.clear()
            self.imports.keys.clear()
            mine = [call for call in calls if call[2] in self.functions]
            self._name(mine)
            blocks = []
            try:
                for one in self.functions:
                    blocks.append((one, *self._block(one)))
                for function, callee, one in mine:
                    if function.name not in self.own and ast.unparse(callee) != _called(one):
                        raise Unclear("a method of the user's calls it by another name")
            except Unclear as unclear:
                self._leave(one, unclear)
                continue
            return self._joined(source, mine, blocks)

    def _joined(
        self, source: str, calls: list[Call], blocks: list[tuple[Found, str, int]]
    ) -> tuple[str, set[str]]:
        lines, edited = Lines(source), set[str]()
        for function, callee, one in calls:
            if ast.unparse(callee) != _called(one):
                lines.replace(lines.begin(callee), lines.end(callee), _called(one))
                edited.add(function.name)
        text = lines.part(0, len(lines.data))
        text += "" if text.endswith("\n") else "\n"
        self.begins = text.count("\n") + 1
        text += "".join(f"{line}\n" for line in self.imports.statements(self.imports.made))
        self.placed = []
        for one, block, before in blocks:
            first = text.count("\n") + 1
            self.placed.append((one, range(first + before, first + block.count("\n"))))
            text += block
        return text, edited

    def _name(self, calls: list[Call]) -> None:
        """Give the functions names: that by which the user's call them, where it is one."""
        for one in self.functions:
            ends = ".apply" * (one.owner is not None)
            names = [ast.unparse(callee).removesuffix(ends) for _, callee, called in calls if called is one]
            given = [n for n in names if n.isidentifier() and self.imports.names.get(n) is one.value]
            one.key = given[0] if given else self.imports.free(one.name)
            self.imports.keys.add(one.key)

    def _block(self, one: Found) -> tuple[str, int]:
        """The text of a function, and how many lines of it stand before its `def`."""
        node, lines = one.node, Lines(one.source)
        self._edit(lines, one)
        last = lines.starts[node.end_lineno or node.lineno]
        if one.owner is not None:
            bases = [self._spelled(base, one, None) for base in one.owner.bases]
            text = f"class {one.key}({', '.join(bases)}):\n" + lines.part(lines.at(one.lines.start, 0), last)
            return f"\n\n{text.rstrip()}\n", 3 + node.lineno - one.lines.start
        kept = [d for d in node.decorator_list if not _is_of_torch(d, one)]
        one.dropped = len(kept) < len(node.decorator_list)
        above = [" ".join(lines.part(lines.begin(d), lines.end(d)).split()) for d in kept]
        name = one.name.encode()
        at = lines.data.index(name, lines.begin(node) + len("def "))
        lines.replace(at, at + len(name), one.key)
        text = "".join(f"@{line}\n" for line in above) + lines.part(lines.begin(node), last)
        return f"\n\n{text.rstrip()}\n", 2 + len(kept)

    def _edit(self, lines: Lines, one: Found) -> None:
        """Replace what has another name in the user's file, and leave out annotations."""
        node, names, bound = one.node, globals_of(one.node), bound_in(one.node)
        apart = set[int]()  # names that are no variables, or replaced with what is around them
        for callee, called in one.calls:
            if called in self.functions:
                lines.replace(lines.begin(callee), lines.end(callee), _called(called))
        for part in tree_nodes(node):
            if isinstance(part, ast.JoinedStr):
                apart |= {id(n) for n in tree_nodes(part)}
                text = self._spelled(part, one, names)
                if text != ast.unparse(part):
                    lines.replace(lines.begin(part), lines.end(part), text)
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Subscript):
                self._edit_launch(lines, part.func.value, one, bound)
        annotations = _annotations(node)
        apart |= {id(n) for one_of in annotations for n in tree_nodes(one_of)}
        for part in tree_nodes(node):
            if isinstance(part, ast.Name) and part.id in names and id(part) not in apart:
                text = self.imports.spelled(one.module, part.id)
                if text != part.id:
                    lines.replace(lines.begin(part), lines.end(part), text)
            elif isinstance(part, ast.arguments):
                _leave_annotations(lines, part)
            elif isinstance(part, ast.FunctionDef) and part.returns is not None:
                arrow = lines.data.rindex(b"->", 0, lines.begin(part.returns))
                closed = lines.data.rindex(b")", 0, arrow) + 1
                lines.leave_out(closed, lines.end(part.returns))

    def _edit_launch(self, lines: Lines, launched: ast.expr, one: Found, bound: set[str]) -> None:
        """A kernel that is an attribute of a module gets a name of its own."""
        kernel = resolved(launched, vars(one.module), bound)
        if isinstance(launched, ast.Attribute) and jit_function(kernel) is not None:
            home = resolved(launched.value, vars(one.module), bound)
            lines.replace(
                lines.begin(launched), lines.end(launched), self.imports.spelled(home, launched.attr)
            )

    def _spelled(self, expression: ast.expr, one: Found, names: set[str] | None) -> str:
        """An expression in one line, its `names` (None: all) as they are called in the user's file."""
        imports = self.imports

        class Spelled(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                if names is not None and node.id not in names:
                    return node
                return ast.parse(imports.spelled(one.module, node.id), mode="eval").body

        return ast.unparse(Spelled().visit(copy.deepcopy(expression)))


def _called(one: Found) -> str:
    return one.key if one.owner is None else f"{one.key}.apply"


def _leave_annotations(lines: Lines, given: ast.arguments) -> None:
    positional = [*given.posonlyargs, *given.args]
    defaults = dict(zip(reversed(positional), reversed(given.defaults), strict=False))
    defaults |= {a: d for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None}
    for arg in [*positional, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]:
        if arg.annotation is not None:
            named = lines.begin(arg) + len(arg.arg.encode())
            if (
                arg in defaults
                and b"(" not in lines.data[lines.end(arg.annotation) : lines.begin(defaults[arg])]
            ):
                lines.leave_out(named, lines.begin(defaults[arg]), "=")
            else:
                lines.leave_out(named, lines.end(arg.annotation))


def _annotations(node: ast.AST) -> list[ast.expr]:
    found = [n.annotation for n in tree_nodes(node) if isinstance(n, (ast.arg, ast.AnnAssign))]
    found += [n.returns for n in tree_nodes(node) if isinstance(n, ast.FunctionDef)]
    return [one for one in found if one is not None]


def _is_of_torch(decorator: ast.expr, one: Found) -> bool:
    """Whether a decorator is about how the function is run: the backward's copies leave it out."""
    named = decorator.func if isinstance(decorator, ast.Call) else decorator
    value = resolved(named, vars(one.module), set())
    while value is None and isinstance(named, ast.Attribute):
        named = named.value
        value = resolved(named, vars(one.module), set())
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return home.partition(".")[0] in ("torch", "kernel_agent")


def _check(one: Found) -> None:
    """Whether the text is all of a function. Raises Unclear."""
    if one.handed:
        raise Unclear(f"{one.name} is handed on as a value")
    if one.owner is not None:
        methods = {n.name for n in one.owner.body if isinstance(n, ast.FunctionDef)}
        if one.owner.decorator_list or one.owner.keywords or "setup_context" in methods:
            raise Unclear(f"{one.name} is more than a forward and a backward")
    if one.owner is None and one.node.decorator_list:
        return  # what the decorators make of it is compared
    plain = inspect.unwrap(one.value.forward) if one.owner is not None else one.value
    code = getattr(plain, "__code__", None)
    if code is None or code.co_firstlineno != one.lines.start or code.co_name != one.node.name:
        raise Unclear(f"{one.name} is not what its text makes")

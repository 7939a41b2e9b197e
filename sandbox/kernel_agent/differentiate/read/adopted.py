"""Host functions of other modules: a library's own launchers, which the stub calls.

A launch that stands in another file cannot be replaced there. So the functions between the stub and such a
launch are read as if they stood at the end of the user's file: their text, with what it takes from their
module imported. Traced, differentiated and copied they are functions like any other then. What is not certain
to be the same there stays where it is, and its launches are refused.
"""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import Unusable
from ...forward import Forward
from ...source import autodiff_names
from ..ir.refusal import Refusal
from .adopted_names import Imports, Unclear, same
from .adopted_search import Found, Search
from .adopted_text import Text


@dataclass(frozen=True)
class Place:
    """Lines that are read as the user's, and where they really stand."""

    lines: range
    path: str
    last: int  # there: of what stands above a body there may be less here
    via: int  # the line of the user's file that leads there

    def line(self, at: int) -> int:
        return self.last - (self.lines.stop - 1 - at)


@dataclass
class Adopted:
    """What of other modules is read as the user's."""

    imports: Imports
    places: list[Place] = field(default_factory=list)
    # What has to stay where it is: file, lines, and the reason.
    problems: list[tuple[str, range, str]] = field(default_factory=list)

    def place(self, line: int | None) -> Place | None:
        return next((one for one in self.places if line is not None and line in one.lines), None)

    def reason(self, path: str, line: int) -> str:
        """Why a launch stays in another file, as the end of a sentence; "" where that is not known."""
        found = [text for file, lines, text in self.problems if file == path and line in lines]
        return f": {found[0]}" if found else ""

    def told(self, refusal: Refusal, path: str) -> Refusal:
        """A refusal, with the place where its line really stands, told at the line that leads there."""
        place = self.place(refusal.line) if refusal.file in (None, path) else None
        if place is not None and refusal.line is not None:
            refusal.file, refusal.line = place.path, place.line(refusal.line)
            refusal.seen_from(path, place.via)
        return refusal

    def place_of(self, error: Unusable, path: str) -> None:
        """Have an error of what is read as the user's name the line where it really stands."""
        place = self.place(error.line) if error.file == path else None
        if place is not None and error.line is not None:
            error.message = f"{Path(place.path).name}:{place.line(error.line)}: {error.message}"
            error.args, error.line = (error.message,), place.via


@contextlib.contextmanager
def reading(fwd: Forward) -> Iterator[Forward]:
    """The forward with the host functions of other modules that its launches need; until the end the user's
    module has their names, too. What it has of them is told by `fwd.adopted`."""
    search = Search(fwd)
    needed = search.needed()
    adopted = Adopted(Imports(fwd), problems=search.problems)
    text = Text(fwd.tree, adopted.imports, needed, search.problems)
    source, edited = text.written(fwd.source, search.own_calls)
    if not text.functions:
        yield replace(fwd, adopted=adopted)
        return
    adopted.places = [Place(lines, one.path, one.lines.stop - 1, one.via) for one, lines in text.placed]
    names = vars(fwd.module)
    before = dict(names)
    new = replace(fwd, source=source, tree=ast.parse(source), hoisted=None, adopted=adopted)
    try:
        _define(new, text.functions, edited, text.begins)
        yield new
    finally:
        ours = {one.key for one in text.functions} | set(adopted.imports.made) | edited
        for name in ours | set(new.hoisted or ()):
            names.pop(name, None)
            if name in before:
                names[name] = before[name]


def _define(new: Forward, functions: list[Found], edited: set[str], begins: int) -> None:
    """Run what is read as the user's, from the line where it begins, in the user's module; and the functions
    of the user's that are `edited`, which call it by other names."""
    own = [copy.copy(n) for n in new.tree.body if isinstance(n, ast.FunctionDef) and n.name in edited]
    marks = autodiff_names(new.tree)
    for function in own:
        kept = [d for d in function.decorator_list if not _is_mark(d, marks)]
        function.decorator_list = kept if function.name == new.stub_name else function.decorator_list
    body = [n for n in new.tree.body if n.lineno >= begins]
    names = vars(new.module)
    try:
        with new.active():
            code = compile(ast.Module([*body, *own], []), new.path, "exec", dont_inherit=True)
            exec(code, names)  # noqa: S102 (the user's own functions, and those that they call)
    except Exception as error:
        message = f"the functions that launch for {new.stub_name}() cannot stand in this file"
        reason = f"{message} ({type(error).__name__}: {error})"
        raise Refusal(
            "launch", reason, "Launch the kernel in this file.", new.stub_line, file=new.path
        ) from error
    for one in functions:
        decorated = one.owner is None and one.node.decorator_list and not one.dropped
        if decorated and not same(names[one.key], one.value):
            raise Refusal(
                "launch",
                f"{one.name} of {Path(one.path).name} is not what its text makes",
                "Launch the kernel in this file.",
                one.via,
                file=new.path,
            )
    if new.stub_name in edited:
        new.stub = names[new.stub_name]


def _is_mark(decorator: ast.expr, marks: set[str]) -> bool:
    callee = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (callee.id if isinstance(callee, ast.Name) else getattr(callee, "attr", None)) in marks


__all__ = ["Adopted", "Unclear", "reading"]

"""The copy of a forward kernel that also saves what its backward needs (see `schedule/saved.py`)."""

from __future__ import annotations

import ast

from ..read.trace import Site, program_axes
from ..schedule.saved import Saved
from .line_breaks import WIDTH, break_line, wrap


def copy_text(site: Site, lines: list[str], saved: list[Saved], name: str) -> str:
    """The user's kernel with one store more for each variable; `lines` are those of the forward file."""
    source, tl = site.source, site.kernel.tl
    given = source.args
    params = [ast.unparse(arg) for arg in given.args]
    for at, value in enumerate(given.defaults, len(params) - len(given.defaults)):
        params[at] += f" = {ast.unparse(value)}" if given.args[at].annotation else f"={ast.unparse(value)}"
    params = [*(kept.buffer for kept in saved), *params]
    head = [f"def {name}({', '.join(params)}):"]
    if len(head[0]) > WIDTH:
        head = [f"def {name}(", *("    " + line + "," for line in wrap(params, WIDTH - 5)), "):  # fmt: skip"]
    first = source.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(source.body) > 1:
        first = source.body[1]
    indent = " " * first.col_offset
    body = lines[first.lineno - 1 : source.end_lineno]
    number = ""
    for axis in reversed(program_axes(site)):
        one = f"{tl}.program_id({axis})"
        around = f"({number})" if "+" in number else number
        number = f"{around} * {tl}.num_programs({axis}) + {one}" if number else f"{one}.to({tl}.int64)"
    what = ", ".join(kept.variable for kept in saved)
    stores = [f"{indent}# {source.name} as above; the backward needs {what}"]
    for kept in saved:
        place = f"({number})" if kept.shape and "+" in number else number
        for dim in kept.shape:
            size = dim.attrs["name"] if dim.op == "constexpr" else str(dim.value)
            place = f"{place} * {size} + {tl}.arange(0, {size})" if place else f"{tl}.arange(0, {size})"
        pointer = f"{kept.buffer} + {place}" if place else kept.buffer
        line = f"{tl}.store({pointer}, {kept.variable})"
        stores += [indent + part for part in break_line(line, WIDTH - len(indent))]
    decorators = [f"@{ast.unparse(one)}" for one in source.decorator_list]
    return "\n".join([*decorators, *head, *body, *stores]) + "\n"

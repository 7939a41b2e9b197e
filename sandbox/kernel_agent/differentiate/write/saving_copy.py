"""The copy of a forward kernel that also saves what its backward needs (see `schedule/saved.py`)."""

from __future__ import annotations

import ast
from itertools import groupby

from ..read.trace import Site
from ..reverse.forward_values import STEPS
from ..schedule.saved import Saved, copies, free_name, names_in, ordered
from ..schedule.saved_numbers import assigned, trips_of
from .line_breaks import WIDTH, break_line, folded, wrap

ROWS = "saved_rows"  # so many the backward has, along the axis that shares them out


def copy_text(site: Site, lines: list[str], saved: list[Saved], name: str) -> str:
    """The user's kernel with one store more for each variable; `lines` are those of the forward file."""
    source, tl = site.source, site.kernel.tl
    given = source.args
    params = [ast.unparse(arg) for arg in given.args]
    for at, value in enumerate(given.defaults, len(params) - len(given.defaults)):
        params[at] += f" = {ast.unparse(value)}" if given.args[at].annotation else f"={ast.unparse(value)}"
    taken = names_in(source) | {kept.buffer for kept in saved} | {STEPS}
    row, rows_name = saved[0].row, free_name(ROWS, taken)
    steps = [STEPS] * bool(trips_of(saved))
    params = [*(kept.buffer for kept in saved), *[rows_name] * (row is not None), *steps, *params]
    head = [f"def {name}({', '.join(params)}):"]
    if len(head[0]) > WIDTH:
        head = [f"def {name}(", *("    " + line + "," for line in wrap(params, WIDTH - 5)), "):  # fmt: skip"]
    first = source.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(source.body) > 1:
        first = source.body[1]
    indent = " " * first.col_offset
    last, body = source.body[-1], lines[first.lineno - 1 : source.end_lineno]
    if isinstance(last, ast.Return):  # what is saved comes after it
        above = lines[last.lineno - 1][: last.col_offset].rstrip("; ")
        body = [*lines[first.lineno - 1 : last.lineno - 1], *[above] * bool(above)]
    number = ""
    for axis in reversed([axis for axis in ordered(site, row) if axis != row]):
        one = f"{tl}.program_id({axis})"
        around = f"({number})" if "+" in number else number
        number = f"{around} * {tl}.num_programs({axis}) + {one}" if number else f"{one}.to({tl}.int64)"
    cuts = [one for one in saved if one.cut is not None]
    for end, kepts in groupby(sorted(cuts, key=_from_the_end), key=lambda one: one.cut.end):
        more: list[str] = []
        for kept in kepts:
            if (call := kept.cut.call) is not None:
                _replace(body, call, first.lineno, kept.text)
            more = [*_tile(kept, tl, WIDTH - len(indent)), *more]
        at = end - first.lineno + 1
        body[at:at] = [indent + line for line in more]
    _tape(body, [kept for kept in saved if kept.taped is not None], first.lineno, number, tl, taken)
    saved = [kept for kept in saved if kept.cut is None and kept.taped is None]
    if not saved:
        return "\n".join([*_decorators(site), *head, *body]) + "\n"
    what = ", ".join(kept.text for kept in saved)
    stores = [f"{indent}# {source.name} as above; the backward needs {what}"]
    if row is not None:
        (dim,) = saved[0].shape
        block = dim.attrs["name"]
        rows = f"{tl}.program_id({row}) * {block} + {tl}.arange(0, {block})"
        around = f"({number})" if "+" in number else number
        base = f"{around} * {rows_name} + " if number else ""
        for kept in saved:
            line = f"{tl}.store({kept.buffer} + {base}{rows}, {kept.text}, mask={rows} < {rows_name})"
            stores += [indent + part for part in break_line(line, WIDTH - len(indent))]
    for kept in saved if row is None else ():
        stores += [indent + part for part in _stored(kept, number, tl, WIDTH - len(indent), taken)]
    return "\n".join([*_decorators(site), *head, *body, *stores]) + "\n"


def _stored(kept: Saved, number: str, tl: str, width: int, taken: set[str]) -> list[str]:
    """The store of a value that is the entry of some number, a block row by row."""
    place, lines = number, []
    for axis, dim in enumerate(kept.shape):
        size = dim.attrs["name"] if dim.op == "constexpr" else str(dim.value)
        lanes = f"{tl}.arange(0, {size})" + "[None, :]" * axis
        around = f"({place})" if "+" in place else place
        place = f"{around} * {size} + {lanes}" if place else lanes
        if axis + 1 < len(kept.shape):
            rows = free_name(f"{kept.buffer}_rows", taken)
            lines += break_line(f"{rows} = {place}", width)
            place = f"{rows}[:, None]"
    pointer = f"{kept.buffer} + {place}" if place else kept.buffer
    return lines + break_line(f"{tl}.store({pointer}, {kept.text})", width)


def _tape(lines: list[str], saved: list[Saved], first: int, program: str, tl: str, taken: set[str]) -> None:
    """Store numbers of every step in loops whose variable is its number, in lines from the `first` on."""
    at = free_name("tape_at", taken)
    more: list[tuple[int, list[str]]] = []
    for loop, kepts in groupby(sorted(saved, key=_loop_line), key=_loop_line):
        texts = []
        for kept in kepts:
            indent, loop_of = kept.taped.at.statement.col_offset, kept.taped.at.loop
            step = loop_of.target.id
            number = f"{at} + {step}" if program else step
            stored = _stored(kept, number, tl, WIDTH - indent, taken)
            more.append((_line(kept), [" " * indent + line for line in stored]))
            texts.append(kept.text)
        told = folded(f"of each step the backward needs {', '.join(texts)}", WIDTH - loop_of.col_offset - 2)
        before = [f"# {line}" for line in told]
        around = f"({program})" if "+" in program else program
        before += break_line(f"{at} = {around} * {STEPS}", WIDTH - loop_of.col_offset) * bool(program)
        more.append((loop, [" " * loop_of.col_offset + line for line in before]))
    for line, text in sorted(more, key=lambda one: -one[0]):
        lines[line - first : line - first] = text


def _loop_line(kept: Saved) -> int:
    return kept.taped.at.loop.lineno


def _line(kept: Saved) -> int:
    """The line in front of which a number of every step is stored: that of the statement with the call, or
    the one behind it, where it assigns the number."""
    statement = kept.taped.at.statement
    behind = assigned(kept.taped.at) is not None
    return (statement.end_lineno or statement.lineno) + 1 if behind else statement.lineno


def _replace(lines: list[str], call: ast.Call, first: int, name: str) -> None:
    """Put a name into the place of a call, in lines from the `first` on."""
    begin, end = call.lineno - first, (call.end_lineno or call.lineno) - first
    head, tail = lines[begin].encode()[: call.col_offset], lines[end].encode()[call.end_col_offset :]
    lines[begin : end + 1] = [(head + name.encode() + tail).decode()]


def _from_the_end(kept: Saved) -> tuple[int, int, int]:
    """Where the copy is changed: what is behind is changed before."""
    call = kept.cut.call
    return (-kept.cut.end, -call.lineno, -call.col_offset) if call is not None else (-kept.cut.end, 0, 0)


def _tile(kept: Saved, tl: str, width: int) -> list[str]:
    """The store of a tile behind the loop that made it, or the call that gives it."""
    cut = kept.cut
    (row, column), (rows, columns) = cut.index, (length.attrs["name"] for length in cut.matrix.lengths)
    place = f"{row}[:, None].to({tl}.int64) * {columns} + {column}[None, :]"
    inside = f"({row}[:, None] < {rows}) & ({column}[None, :] < {columns})"
    line = f"{tl}.store({kept.buffer} + {place}, {kept.text}, mask={inside})"
    told = [f"# saved for the backward: `{kept.text}`"]
    if cut.call is not None:
        told[:0] = break_line(f"{kept.text} = {ast.unparse(cut.call)}", width)
    if not cut.test:
        return [*told, *break_line(line, width)]
    return [*told, f"if {cut.test}:", *("    " + part for part in break_line(line, width - 4))]


def _decorators(site: Site) -> list[str]:
    """The kernel's own; an autotuner is left the configurations that have whole blocks of the backward."""
    copied, lines = copies(site), []
    for one in site.source.decorator_list:
        tuner = isinstance(one, ast.Call) and ast.unparse(one.func).endswith("autotune")
        if isinstance(one, ast.Call) and tuner and copied is not None and copied.left:
            configs = next((k.value for k in one.keywords if k.arg == "configs"), None) or one.args[0]
            rest = [ast.unparse(a) for a in one.args[1:]]
            rest += [f"{k.arg}={ast.unparse(k.value)}" for k in one.keywords if k.arg != "configs"]
            chosen = f"[c for c in {ast.unparse(configs)} if {copied.left}]"
            lines += [f"@{ast.unparse(one.func)}(", *(f"    {part}," for part in (chosen, *rest)), ")"]
        else:
            lines += break_line(f"@{ast.unparse(one)}", WIDTH)
    return lines

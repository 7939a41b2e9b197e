"""Tiles that took a loop, saved by a copy of the forward as a matrix: a product of matrices in front of an
activation need not be computed again.

    for k in range(...): acc = tl.dot(a, b, acc)
    tl.store(saved_acc + rows[:, None].to(tl.int64) * N + columns[None, :], acc, mask=...)
    y = gelu(acc + bias)

It is done where the loop stands in the body of the kernel, the kernel has variables for the rows and columns
of its tile, and where the backward has tiles of its own: of any size, as the matrix does not hang on them. In
float32, as it was computed. What a flag alone wants is saved where the flag is set.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass

from ..ir.nodes import For, If, Node, nodes_in, operands, reachable
from ..ir.rewriter import Rewriter
from ..ir.values import assigned_names, is_static
from ..read.trace import Grid, Site, program_axes
from ..reverse.sweep import Reverse
from . import saved
from .kept_tiles import Matrix, matrix
from .programs import program_variables


@dataclass(frozen=True)
class Cut:
    """A tile of the forward that its copy stores behind the loop that ends in line `end`."""

    tile: Node
    name: str
    end: int
    matrix: Matrix
    index: tuple[str, str]  # names of the kernel's rows and columns
    flag: Node | None = None
    test: str = ""  # the flag as the kernel's text has it


def offers(reverse: Reverse, site: Site, own: Grid | None) -> bool:
    """Whether the forward could save tiles, so that the backward runs none of its loops."""
    return bool(own is not None and _cuts(reverse, site, own))


def use(reverse: Reverse, site: Site) -> list[saved.Saved]:
    """Replace tiles by loads of what the forward's copy saves."""
    g, own = reverse.kernel.graph, site.blocks
    cuts = _cuts(reverse, site, own) if isinstance(own, Grid) else []
    taken = {n.arg for n in site.source.args.args} | {*assigned_names(site.source.body)}
    loads: dict[Node, Node] = {}
    made: list[saved.Saved] = []
    for cut in cuts:
        buffer = f"saved_{cut.name}"
        while buffer in taken:
            buffer += "_"
        taken.add(buffer)
        kept = saved.Saved(cut.name, buffer, "float32", cut.tile.shape, g.product(cut.tile.shape), cut=cut)
        made.append(kept)
        g.reverse, g.line = False, cut.tile.line
        with g.at(g.top):
            at, inside = cut.matrix.place(g, cut.tile.shape)
            attrs = {"other": True, "buffer": True, "saved": True, "tile": True}
            args = (g.scratch(buffer, "float32"), at, inside, g.number(0))
            loads[cut.tile] = g.make("load", args, attrs, "float32", cut.tile.shape)
        loads[cut.tile].hint = cut.name
        reverse.say(cut.tile.line, "saved", "none", f"`{cut.name}` took a loop: the forward saves it")
    g.reverse = True
    if loads:
        reverse.effects = Rewriter(g, loads.get).effects(reverse.effects)
    return made


def _cuts(reverse: Reverse, site: Site, own: Grid) -> list[Cut]:
    """The tiles, where those are all that the backward has of the forward's loops."""
    if not saved.copyable(site):
        return []
    kernel, source = reverse.kernel, site.source
    found: list[Cut] = []
    numbered = program_variables(kernel, reverse.effects, program_axes(site)).numbered
    known = list(nodes_in(kernel.effects))
    for tile in _looped(reverse):
        place = matrix(own, numbered, tile, known)
        loop = _statement(source, tile.attrs["loop"])
        if place is None or loop is None or tile.dtype != "float32":
            return []
        name, index = _named(tile, loop), _index(reverse, source, place, tile, loop)
        lengths = {length.attrs["name"] for length in place.lengths}
        if name is None or index is None or lengths & {*assigned_names(source.body)}:
            return []
        flag = _flag(reverse, tile)
        test = None if flag is None else _test(source, flag)
        if flag is not None and test is not None:
            cond = flag[0].cond
            found.append(Cut(tile, name, loop.end_lineno or 0, place, index, cond, test))
        else:
            found.append(Cut(tile, name, loop.end_lineno or 0, place, index))
    return found


def _looped(reverse: Reverse) -> list[Node]:
    """What the backward has of the forward's loops."""
    nodes = [n for n in reachable(reverse.effects) if isinstance(n, Node) and n.op == "loopout"]
    return [n for n in nodes if n.attrs["loop"].source is None and not n.reverse]


def _statement(source: ast.FunctionDef, loop: For) -> ast.For | None:
    """The loop in the body of the kernel."""
    return next((s for s in source.body if isinstance(s, ast.For) and s.lineno == loop.line), None)


def _named(tile: Node, loop: ast.For) -> str | None:
    """The variable that holds the tile behind the loop."""
    outs = [out for out in tile.attrs["loop"].outs.values() if out.hint == tile.hint]
    return tile.hint if len(outs) == 1 and tile.hint in assigned_names(loop.body) else None


def _index(
    reverse: Reverse, source: ast.FunctionDef, place: Matrix, tile: Node, loop: ast.For
) -> tuple[str, str] | None:
    """The variables that hold the rows and columns of a tile, assigned once, in front of the loop."""
    times = Counter(assigned_names(source.body))
    before = [s for s in source.body if s.lineno < loop.lineno and isinstance(s, ast.Assign)]
    certain = {name for name in assigned_names(before) if times[name] == 1}  # type: ignore[arg-type]
    names = {node: name for name, node in reverse.kernel.variables.items() if name in certain}
    row, column = (names.get(node) for node in place.index(reverse.kernel.graph, tile.shape))
    return None if row is None or column is None else (row, column)


def _flag(reverse: Reverse, tile: Node) -> tuple[If, bool] | None:
    """The branch known at compile time that alone wants a tile, and which of its sides; None: always."""
    found: set[tuple[If, bool]] = set()

    def parts(item: object) -> list:
        if isinstance(item, Node) and item.op == "ifout" and is_static(item.args[0]):
            for side, positive in (("then", True), ("other", False)):
                value = item.attrs[side]
                if value is not None and tile in set(nodes_in([value])):
                    found.add((item.attrs["if"], positive))
            return [item.args[0]]
        return operands(item)

    wanted = any(item is tile for item in reachable(reverse.effects, parts))
    return None if wanted or len(found) != 1 else found.pop()


def _test(source: ast.FunctionDef, flag: tuple[If, bool]) -> str | None:
    """How the kernel asks for the branch, of its parameters alone."""
    branch, positive = flag
    found = [s for s in source.body if isinstance(s, ast.If) and s.lineno == branch.line]
    if len(found) != 1 or not positive:
        return None
    names = {n.id for n in ast.walk(found[0].test) if isinstance(n, ast.Name)}
    return None if names & {*assigned_names(source.body)} else ast.unparse(found[0].test)

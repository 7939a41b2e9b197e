"""Tiles that took a loop, saved by a copy of the forward as a matrix: a product of matrices in front of an
activation need not be computed again.

    for k in range(...): acc = tl.dot(a, b, acc)
    tl.store(saved_acc + rows[:, None].to(tl.int64) * N + columns[None, :], acc, mask=...)
    y = gelu(acc + bias)

It is done where the loop stands in the body of the kernel, or in a helper whose value is saved then, where
the kernel has variables for the rows and columns of its tile, and where the backward has tiles of its own: of
any size, as the matrix does not hang on them. In float32, as it was computed. What a flag alone wants is
saved where the flag is set. Lanes beyond the matrix have what the forward has there, where a loop leaves what
it begins with: nothing of them is stored, but zero times what is made of another number might be NaN in a
sum.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from ...source import tree_nodes
from ..ir.graph import Graph
from ..ir.nodes import If, Node, nodes_in, operands, reachable
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import Kernel, assigned_names, is_static
from ..prove import zeros
from ..read.block_sizes import Grid
from ..read.trace import Site, program_axes
from ..reverse.sweep import Reverse
from . import saved
from .kept_tiles import Matrix, matrix
from .programs import program_variables


@dataclass(frozen=True)
class Cut:
    """A tile of the forward that its copy stores behind line `end`: where its loop ends; or in front of the
    statement with the call that gives it, which the copy gives the name."""

    tile: Node
    name: str
    end: int
    matrix: Matrix
    index: tuple[str, str]  # names of the kernel's rows and columns
    beyond: Node  # what lanes beyond the matrix have
    flag: Node | None = None
    test: str = ""  # the flag as the kernel's text has it
    call: ast.Call | None = None


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
            args = (g.scratch(buffer, "float32"), at, inside, cut.beyond)
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
    for looped in _looped(reverse):
        tile, at = _made(kernel, source, looped)
        place = matrix(own, numbered, tile, known)
        if place is None or at is None or tile.dtype != "float32":
            return []
        index = _index(reverse, source, place, tile, at)
        lengths = {length.attrs["name"] for length in place.lengths}
        if index is None or lengths & {*assigned_names(source.body)}:
            return []
        beyond = _beyond(reverse.kernel.graph, tile, place)
        flag = _flag(reverse, tile)
        test = None if flag is None else _test(source, flag)
        cond = flag[0].cond if flag is not None and test is not None else None
        name, end, call = _named(kernel, source, tile, at, {cut.name for cut in found})
        if name is None or beyond is None:
            return []
        if all(tile is not cut.tile for cut in found):
            found.append(Cut(tile, name, end, place, index, beyond, cond, test or "", call))
    calls = [cut.call for cut in found if cut.call is not None]
    nested = any(one in set(tree_nodes(call)) for call in calls for one in calls if one is not call)
    return [] if nested or _looped(reverse, {cut.tile for cut in found}) else found


def _looped(reverse: Reverse, but: Container[object] = ()) -> list[Node]:
    """What the backward has of the forward's loops, but for what some values are made of."""
    items = reachable(reverse.effects, lambda item: [] if item in but else operands(item))
    nodes = [n for n in items if isinstance(n, Node) and n.op == "loopout" and n not in but]
    return [n for n in nodes if n.attrs["loop"].source is None and not n.reverse]


def _made(kernel: Kernel, source: ast.FunctionDef, looped: Node) -> tuple[Node, ast.stmt | None]:
    """What a loop in the body of the kernel leaves, with the loop; or what a helper makes of it there, with
    the statement that calls it."""
    line = looped.attrs["loop"].line
    loop = next((s for s in source.body if isinstance(s, ast.For) and s.lineno == line), None)
    if loop is not None:
        return looped, loop
    for value, call in kernel.looped.items():
        if looped in set(nodes_in([value])):
            return value, next((s for s in source.body if call in set(tree_nodes(s))), None)
    return looped, None


def _beyond(g: Graph, tile: Node, place: Matrix) -> Node | None:
    """What the lanes of a tile beyond the matrix have: of what loops begin with, if they leave that."""
    lanes = list(zip(place.index(g, tile.shape), place.lengths, (0, 1), strict=True))
    left: dict[Node, Node] = {}
    for out in (n for n in nodes_in([tile]) if n.op == "loopout"):
        carry = out.attrs["loop"].carries[out.attrs["index"]]
        terms = carry.next.args if carry.next is not None and carry.next.op == "add" else ()
        more = [term for term in terms if term is not carry.phi]
        if len(more) != 1 or not all(zeros.beyond(more[0], bound, None) for bound in lanes):
            return None
        left[out] = carry.init
    with g.at(g.top):
        value = Rewriter(g, left.get).node(tile)
    return g.number(0) if is_zero(value) else value


def _named(
    kernel: Kernel, source: ast.FunctionDef, tile: Node, at: ast.stmt, taken: set[str]
) -> tuple[str | None, int, ast.Call | None]:
    """The variable that holds a tile behind a line; or one for what a call behind it gives."""
    end = at.end_lineno or 0
    if isinstance(at, ast.For):
        outs = [out for out in tile.attrs["loop"].outs.values() if out.hint == tile.hint]
        alone = len(outs) == 1 and tile.hint in assigned_names(at.body)
        return tile.hint if alone else None, end, None
    call = kernel.looped[tile]
    if isinstance(at, ast.Assign) and at.value is call and isinstance(at.targets[0], ast.Name):
        return at.targets[0].id, end, None
    name = tile.hint or "tile"
    known = {n.id for n in tree_nodes(source) if isinstance(n, ast.Name)} | {n.arg for n in source.args.args}
    while name in known | taken:
        name += "_"
    plain = isinstance(at, ast.Assign | ast.AugAssign | ast.Expr)
    return name if plain else None, at.lineno - 1, call


def _index(
    reverse: Reverse, source: ast.FunctionDef, place: Matrix, tile: Node, at: ast.stmt
) -> tuple[str, str] | None:
    """The variables that hold the rows and columns of a tile, assigned once, in front of what makes it."""
    times = Counter(assigned_names(source.body))
    before = [s for s in source.body if s.lineno < at.lineno and isinstance(s, ast.Assign)]
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
    names = {n.id for n in tree_nodes(found[0].test) if isinstance(n, ast.Name)}
    return None if names & {*assigned_names(source.body)} else ast.unparse(found[0].test)

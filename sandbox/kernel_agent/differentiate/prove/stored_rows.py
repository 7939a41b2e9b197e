"""Rows that data tells, and that the stores of an output keep apart.

    m = tl.load(table_ptr + tl.program_id(0)) + lane
    x at m * K + k, masked: m < end, k < K          y stored at m * N + n, masked: m < end, n < N

No two programs, steps or lanes store to one address of an output: of a forward whose addresses are data, that
is assumed (`overwrite`). Two of them with one row m would store to one address of y, at any column. So a row
tells the program and the lane, and what else has these rows under the same conditions has them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.nodes import For, Node, Region, Store, nodes_in, walk
from ..ir.rewriter import Rewriter
from ..ir.values import Kernel
from .affine import Affine, Group, Var, nonzero
from .disjoint import Proof, determined, layouts_of, overlaps, shared_lanes
from .masks import conjuncts


@dataclass(frozen=True)
class Stored:
    """An address with such rows as one variable: its dimensions, what a row tells, and the store."""

    groups: list[Group]
    behind: list[Group]
    store: Store


@dataclass(frozen=True)
class _Row:
    """The dimension of an address that data tells: its variables, the axes of the block that they lie along,
    and the numbers of programs that they hang on."""

    group: Group
    axes: frozenset[int]
    kind: str  # of numbers of programs
    programs: frozenset[Node]

    def terms(self) -> frozenset:
        """Its variables with their factors, wherever in a block they lie."""
        return frozenset((_called(var), multiplier) for var, multiplier in self.group.terms)


def disjoint(
    kernel: Kernel,
    offset: Node,
    mask: Node | None,
    loops: tuple[For, ...],
    axes: list[int],
    grid: tuple[int, ...],
) -> tuple[Proof, Store] | None:
    """A proof like `disjoint.disjoint`'s of an address that has such rows, and the store that it rests on."""
    g, affine = kernel.graph, Affine(kernel.graph)
    found = find(kernel, affine, Rewriter(g, lambda node: None), offset, mask, "pid")
    if found is None:
        return None
    every = found.groups + found.behind
    known = determined(affine, every)
    wanted = {("pid", (axis,)) for axis in axes} | {("trip", (id(loop.region),)) for loop in loops}
    if not wanted <= known or not all(group.solved for group in every):
        return None
    layouts = layouts_of(affine, g, found.groups, mask, len(offset.shape))
    if shared_lanes(g, every, offset, known) or layouts is None:
        return None
    if any(overlaps(g, layout, grid) for layout in layouts):
        return None
    return Proof("rows of stores", layouts), found.store


def find(
    kernel: Kernel,
    affine: Affine,
    tiles: Rewriter,
    offset: Node,
    mask: Node | None,
    programs: str = "vpid",
) -> Stored | None:
    """Rows of an address that the stores of a kernel keep apart: all of them, as some may store nothing, and
    have no upstream then. `tiles`: values in terms of variables of `programs`, as those of `offset` and
    `mask` are."""
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store) and e.value.active]
    groups = affine.groups(offset) or []
    row = _row(affine, groups, programs)
    if row is None or not stores:
        return None
    asked = {_signature(affine, *one) for one in conjuncts(mask, len(offset.shape))}
    if not all(_keeps_apart(affine, tiles, store, row, asked) for store in stores):
        return None
    variables = [affine.variable(program, ()) for program in row.programs]
    variables += [Var("lane", (axis,)) for axis in row.axes]
    one = Var("row", tuple(sorted(row.terms())))
    kept = [Group(group.coefficient, [(one, (1, ()))]) if group is row.group else group for group in groups]
    return Stored(kept, [Group((1, ()), [(var, (1, ()))]) for var in variables], stores[0])


def _keeps_apart(affine: Affine, tiles: Rewriter, store: Store, row: _Row, asked: set[tuple]) -> bool:
    """Whether a store has rows under conditions that are `asked`, at columns that all programs have."""
    regions = [region for region in store.region.chain() if region.kind != "top"]
    if store.kind != "store" or store.base.op != "param" or not all(_same(affine, r) for r in regions):
        return False
    at, where = tiles.node(store.offset), None if store.mask is None else tiles.node(store.mask)
    columns = affine.groups(at) or []
    stored = _row(affine, columns, row.kind)
    if stored is None or stored.terms() != row.terms():
        return False
    others = [var for group in columns if group is not stored.group for var, _ in group.terms]
    conditions = _of_rows(affine, where, len(at.shape), stored)
    return all(_is_column(affine, var, stored) for var in others) and asked.issuperset(conditions)


def _same(affine: Affine, region: Region) -> bool:
    """Whether all programs make the same steps of a loop."""
    return region.bounds is not None and all(map(affine.uniform, region.bounds))


def _row(affine: Affine, groups: list[Group], programs: str) -> _Row | None:
    """The one dimension that data tells, if programs and the lanes of one axis alone do beside it."""
    found = [group for group in groups if any(var.kind == "opaque" for var, _ in group.terms)]
    if len(found) != 1:
        return None
    (group,) = found
    nodes = [var.node for var, _ in group.terms if var.node is not None]
    inside = list(nodes_in(nodes))
    axes = frozenset(axis for var, _ in group.terms for axis in _axes(affine, var))
    if (
        len(nodes) < len(group.terms)
        or len(axes) > 1
        or any(n.op == "pid" for n in inside if programs != "pid")
    ):
        return None
    return _Row(group, axes, programs, frozenset(n for n in inside if n.op == programs))


def _axes(affine: Affine, var: Var) -> Iterator[int]:
    """The axes of a block that a variable lies along."""
    if var.kind == "lane":
        yield var.key[0]
    elif var.kind in ("opaque", "floordiv", "mod") and var.node is not None:
        yield from (
            axis for axis, dim in zip(var.key[1], var.node.shape, strict=True) if not affine.g.is_one(dim)
        )


def _called(var: Var) -> tuple[str, int]:
    """A variable, wherever in a block it lies."""
    return var.kind, -1 if var.node is None else var.node.id


def _is_column(affine: Affine, var: Var, row: _Row) -> bool:
    """Whether a variable is the same for all programs and lanes that may have one row."""
    if var.kind == "trip" and var.region is not None:
        return _same(affine, var.region)
    if var.kind == "lane":
        return var.key[0] not in row.axes
    return var.kind == row.kind and var.node not in row.programs


def _of_rows(affine: Affine, mask: Node | None, rank: int, row: _Row) -> Iterator[tuple]:
    """The conditions of a store that not all programs and lanes of one column share."""
    for node, axes in conjuncts(mask, rank):
        variables = _variables(affine, node, axes)
        if variables is None or not all(_is_column(affine, var, row) for var in variables):
            yield _signature(affine, node, axes)


def _form(affine: Affine, node: Node, axes: tuple[int, ...]) -> dict | None:
    """What a comparison of integers compares with zero."""
    if node.op != "compare" or any(arg.is_float for arg in node.args):
        return None
    left, right = node.args
    return nonzero(affine.terms(affine.g.sub(left, right), axes))


def _variables(affine: Affine, node: Node, axes: tuple[int, ...]) -> list[Var] | None:
    form = _form(affine, node, axes)
    return None if form is None else [var for variables in form for var in variables]


def _signature(affine: Affine, node: Node, axes: tuple[int, ...]) -> tuple:
    """A condition, wherever in a block it is asked."""
    form = _form(affine, node, axes)
    if form is None:
        return (node.id,)
    terms = {
        (tuple(sorted(map(_called, variables))), tuple(sorted(coefficients.items())))
        for variables, coefficients in form.items()
    }
    return (node.attrs["cmp"], frozenset(terms))


def said(store: Store | None) -> str:
    """What is said of a gradient whose rows stores keep apart."""
    if store is None:
        return ""
    name = store.base.attrs["name"]
    return f", whose rows are apart as those of the stores of line {store.line} to `{name}` are"

"""Gradient writes: merge those to one address, and turn atomic adds into stores where a proof allows it.

A write may be a store when no two programs, iterations or lanes can reach one address. The proof splits the
offset into address dimensions; in each the variables must be digits of the index, and together they must
determine every program id, loop variable and lane. That the dimensions themselves do not overlap (a row is
not longer than the row stride) is checked by the host at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..ir.graph import Graph
from ..ir.nodes import For, Node, Region, beneath, nodes_in, reachable
from ..ir.nonnegative import natural
from ..ir.simplify import is_number, is_zero
from ..ir.spelling import on_host
from . import packed
from .affine import Affine, Group, Monomial, Var, divide, nonzero, times, upper
from .masks import comparisons, conjuncts

LANEWISE_INDICES = ("add", "sub", "mul", "neg", "cast", "floordiv", "mod")
Layout = list[tuple[Node, Node | None]]  # (stride, extent) pairs; extent None is the outermost


@dataclass
class Proof:
    """Why a write is a store, and the layouts that the host has to check, with what it asks of tensors."""

    text: str
    layouts: list[Layout] = field(default_factory=list)
    asked: list[packed.Asked] = field(default_factory=list)


def disjoint(
    g: Graph,
    offset: Node,
    mask: Node | None,
    loops: tuple[For, ...],
    axes: list[int],
    entry: Node | None = None,
    grid: tuple[int, ...] | None = None,
    region: Region | None = None,
) -> Proof | str:
    """A proof that (programs x iterations x lanes) -> address is injective, or the reason why there is none.

    `entry`: the address is in the buffer of this number; every number has one of its own. `grid`: of the
    traced launch; with it constexprs that can be strides are, and layouts that overlap there prove nothing.
    `region`: where the write stands.
    """
    affine = Affine(g)

    def attempt(strides: frozenset[int]) -> Proof | str:
        return _disjoint(affine, offset, mask, loops, axes, entry, strides, region, grid)

    found = attempt(frozenset())
    if grid is None:
        return found
    if isinstance(found, Proof):
        meets = any(overlaps(g, layout, grid) for layout in found.layouts)
        return "its windows overlap: one element is read at several places" if meets else found
    strides = affine.strides(offset)
    if not strides:
        return found
    other = attempt(strides)
    if isinstance(other, Proof) and not any(overlaps(g, layout, grid) for layout in other.layouts):
        return other
    return found


def _disjoint(
    affine: Affine,
    offset: Node,
    mask: Node | None,
    loops: tuple[For, ...],
    axes: list[int],
    entry: Node | None,
    strides: frozenset[int],
    region: Region | None,
    grid: tuple[int, ...] | None,
) -> Proof | str:
    g, rank = affine.g, len(offset.shape)
    groups = affine.groups(offset, strides)
    entries = [] if entry is None else affine.groups(entry)
    rows = None if groups is None else packed.rows(affine, groups, mask, rank, region)
    rows = rows or packed.by_heads(affine, offset, mask, region, strides)
    if rows is None or entries is None:
        return "its address is not a sum of strides times indices"
    if rows.asked and asks_flags(mask, rank):
        return "a flag decides what its mask bounds"
    every = rows.groups + rows.behind + entries
    whole = not loops  # steps of a loop may be taps of windows, which overlap in some calls and not in others
    known = determined(affine, every, whole)
    if rows.asked and not all(group.solved for group in rows.groups):
        return "its address mixes the rows of a sequence with other indices"
    if not packed.programs(affine, rows, known):
        return "a number that its row is found by may be negative"
    close(affine, known, every, whole)
    groups = rows.groups
    for axis in axes:
        if ("pid", (axis,)) not in known and not packed.alone(affine, rows, known, axis, grid):
            return f"its address does not determine program_id({axis})"
    for loop in loops:
        if loop.region.kind != "for":
            return "it is written inside a while loop"
        if ("trip", (id(loop.region),)) not in known:
            return f"its address does not determine the loop variable of line {loop.line}"
    if shared_lanes(g, groups + rows.behind, offset, known):
        return "several lanes of a block go to one address"
    names = [[_called(var) for var, _ in group.terms] for group in groups]
    text = "digits: " + "; ".join(map("+".join, names))
    layouts = layouts_of(affine, g, groups, mask, rank)
    of_entries = layouts_of(affine, g, entries, None, 0)
    if layouts is None or of_entries is None:
        return _unbounded(groups + entries)
    return Proof(text, layouts + of_entries, rows.asked)


def asks_flags(mask: Node | None, rank: int) -> bool:
    """Whether a flag decides what a mask bounds: an extent may be a whole block, in other calls only."""
    return any(c.op in ("select", "ifout", "where") for c, _ in conjuncts(mask, rank))


def _called(var: Var) -> str:
    return var.node.op if var.node else "row" if var.kind == "row" else "trip"


def _unbounded(groups: list[Group]) -> str:
    """Why there is no layout: it names the index that a mask could bound."""
    for group in groups:
        for var, _ in group.terms:
            if var.kind == "opaque" and var.node is not None and var.node.hint and not natural(var.node):
                name = var.node.hint
                return f"nothing bounds `{name}` (a mask with {name} >= 0 and {name} < its size does)"
    return "the extents of its address dimensions are not known"


def shared_lanes(
    g: Graph, groups: list[Group], offset: Node, known: Collection[tuple] = frozenset[tuple]()
) -> bool:
    """Whether lanes along some axis of a block go to one address. `known`: variables that it determines."""
    lanes = {var.key[0] for group in groups if group.solved for var, _ in group.terms if var.kind == "lane"}
    lanes |= {key[0] for kind, key in known if kind == "lane"}
    return any(axis not in lanes and not g.is_one(dim) for axis, dim in enumerate(offset.shape))


def determined(affine: Affine, groups: list[Group], whole: bool = False) -> set:
    """The variables that an address determines, of those dimensions that are sums of digits; `whole`: of
    values that it determines by quotient and remainder too."""
    known: set = set()
    for group in groups:
        if affine.solve(group):
            for var, _ in group.terms:
                learn(var, known)
    close(affine, known, groups, digits=whole)
    return known


def learn(var: Var, known: set) -> None:
    known.add((var.kind, var.key) if var.kind not in ("floordiv", "mod") else (var.kind, (var.node.id,)))  # type: ignore[union-attr]


def close(affine: Affine, known: set, groups: list[Group], digits: bool = False) -> None:
    """A value whose quotient and remainder by the same divisor are known is known; its `digits` are too."""
    axes = _axes_of(groups) if digits else {}
    pairs: dict[tuple, dict[str, Node]] = {}
    roots = [var.node for group in groups for var, _ in group.terms if var.node is not None]
    for node in reachable(roots, lambda node: node.args):
        if node.op in ("floordiv", "mod"):
            pairs.setdefault((beneath(node.args[0], "cast").id, node.args[1].id), {})[node.op] = node
    changed = True
    while changed:
        changed = False
        for sides in pairs.values():
            if len(sides) < 2 or not all((op, (n.id,)) in known for op, n in sides.items()):
                continue
            whole, divisor = beneath(sides["mod"].args[0], "cast"), sides["mod"].args[1]
            if not (affine.uniform(divisor) or _determined(divisor, known)):
                continue
            fact = ("pid", (whole.attrs["axis"],)) if whole.op == "pid" else (whole.op, (whole.id,))
            if fact not in known:
                known.add(fact)
                changed = True
                for var in _digits(affine, whole, axes.get(whole.id)):
                    learn(var, known)


def _axes_of(groups: list[Group]) -> dict[int, tuple[int, ...] | None]:
    """Along which axes of an address the values lie that its quotients and remainders are of; None for one
    that lies along several."""
    found: dict[int, tuple[int, ...] | None] = {}
    for var in (var for group in groups for var, _ in group.terms):
        if var.kind not in ("floordiv", "mod") or var.node is None:
            continue
        for node in reachable([var.node], lambda node: node.args if node.op in LANEWISE_INDICES else ()):
            if len(node.shape) == len(var.node.shape):
                found[node.id] = var.key[1] if found.get(node.id, var.key[1]) == var.key[1] else None
    return found


def _digits(affine: Affine, whole: Node, axes: tuple[int, ...] | None) -> list[Var]:
    """The variables that a value determines: those that it is a sum of, as digits are of a number."""
    if axes is None or whole.op == "pid":
        return []
    groups = affine.grouped(affine.terms(whole, axes)) or []
    return [var for var, _ in groups[0].terms] if len(groups) == 1 and affine.solve(groups[0]) else []


def _determined(node: Node, known: set) -> bool:
    if node.op in ("const", "constexpr", "param", "npid"):
        return True
    if node.op == "pid":
        return ("pid", (node.attrs["axis"],)) in known
    if node.op in ("floordiv", "mod") and (node.op, (node.id,)) in known:
        return True
    inner = node.args if node.op not in ("load", "phi") else ()
    return bool(inner) and all(_determined(a, known) for a in inner)


# layout: what the host checks


@dataclass
class Limits:
    """What a mask says of indices, each named by its variable terms."""

    above: dict[frozenset, Node]  # what an index stays below
    floors: set[frozenset]  # those that are not negative

    def natural(self, var: Var) -> bool:
        """Whether a variable is never negative, so that it can be a digit."""
        if var.kind not in ("opaque", "floordiv", "mod"):
            return True
        assert var.node is not None
        return natural(var.node) or frozenset([(var.kind, var.key, (1, ()))]) in self.floors


def layouts_of(
    affine: Affine, g: Graph, groups: list[Group], mask: Node | None, rank: int
) -> list[Layout] | None:
    """What makes an address injective where its dimensions are: one layout, and one more for each joint
    index.

    Chunks of a row overlap the next row where the last chunk is cut short, but the mask `part * chunk + i <
    n` lets no lane there. Such a bound on several dimensions together makes one dimension of them: they must
    not overlap among themselves, and it must not overlap the others. None where more than one extent is
    unknown.
    """
    above = _below_steps(affine, mask, rank) | bounds_of(affine, mask, rank)
    limits = Limits(above, floors_of(affine, mask, rank))
    apart, layouts = list(groups), []
    joined: Layout = []
    for signature, bound in limits.above.items():
        names = {(kind, key) for kind, key, _ in signature}
        joint = [group for group in apart if any((v.kind, v.key) in names for v, _ in group.terms)]
        unit = _unit(joint, signature, limits) if len(joint) > 1 else None
        if unit is not None:
            apart = [group for group in apart if group not in joint]
            layouts.append(_dimensions(affine, g, joint, limits))
            joined.append((monomial_node(affine, g, unit), bound))
    every = [_dimensions(affine, g, apart, limits) + joined, *layouts]
    layouts = [layout for layout in every if len(layout) > 1]
    values = [value for layout in layouts for pair in layout for value in pair if value is not None]
    if layouts and not (all(group.solved for group in groups) and all(map(on_host, values))):
        return None
    for layout in layouts:
        open_ended = [stride for stride, extent in layout if extent is None]
        traced = [g.concrete(stride) for stride, _ in layout]
        if len(open_ended) > 1:
            return None
        if open_ended and (None in traced or g.concrete(open_ended[0]) < max(traced)):
            return None
        layout.sort(key=lambda pair: pair[1] is None)
    return layouts


def overlaps(g: Graph, layout: Layout, grid: tuple[int, ...]) -> bool:
    """Whether the host's check of a layout would already fail on a call that is known: the traced one, or one
    with other strides."""
    if _overlaps(g, layout, g.launched(grid)):
        return True
    named = {n.attrs["name"] for n in nodes_in([stride for stride, _ in layout]) if n.op == "param"}
    return bool(named & g.strides) and any(
        _overlaps(g, layout, g.example_of(launch.args, launch.grid)) for launch in g.others()
    )


def _overlaps(g: Graph, layout: Layout, counts: dict[int, Any]) -> bool:
    known = [(g.concrete(s, counts), None if e is None else g.concrete(e, counts)) for s, e in layout]
    if any(s is None or (n is None and e is not None) for (s, n), (_, e) in zip(known, layout, strict=True)):
        return False
    reach: float = 0
    for stride, extent in sorted(((abs(s), e) for s, e in known if e is None or e > 1), key=lambda d: d[0]):
        if stride <= reach:
            return True
        reach = float("inf") if extent is None else reach + (extent - 1) * stride
    return False


def _dimensions(affine: Affine, g: Graph, groups: list[Group], limits: Limits) -> Layout:
    strides = [monomial_node(affine, g, times(group.coefficient, group.terms[0][1])) for group in groups]
    return [
        (stride, _extent(affine, g, group, limits)) for stride, group in zip(strides, groups, strict=True)
    ]


def _unit(groups: list[Group], signature: frozenset, limits: Limits) -> Monomial | None:
    """The stride of a bounded index that consists of these address dimensions and nothing else.

    No term may be negative: only then is the sum of any of them below the bound too.
    """
    factors = {(kind, key): factor for kind, key, factor in signature}
    terms = [(var, times(group.coefficient, m)) for group in groups for var, m in group.terms]
    if {(v.kind, v.key) for v, _ in terms} != set(factors) or len(terms) != len(signature):
        return None
    if any(factor < 0 for factor, _ in factors.values()) or not all(limits.natural(v) for v, _ in terms):
        return None
    units = {divide(m, factors[v.kind, v.key]) for v, m in terms}
    return units.pop() if len(units) == 1 else None


def _extent(affine: Affine, g: Graph, group: Group, limits: Limits) -> Node | None:
    """How many steps of its lowest digit an index can make: from the mask, else from its highest digit."""
    lowest = group.terms[0][1]
    if not all(limits.natural(var) for var, _ in group.terms):
        return None
    for k, (_, start) in enumerate(group.terms):
        parts = [(var, divide(m, start)) for var, m in group.terms[k:]]
        bound = limits.above.get(frozenset((var.kind, var.key, m) for var, m in parts))
        unit = divide(start, lowest)
        if bound is not None and unit is not None:
            return g.mul(monomial_node(affine, g, unit), bound)
    var, multiplier = group.terms[-1]
    unit = divide(multiplier, lowest)
    if unit is None:
        return None
    if var.kind == "trip" and var.region is not None:
        lo, hi, step = var.region.bounds  # type: ignore[misc]
        last = upper(g, hi)
        if last is None or not affine.uniform(step):
            return None
        digit = _start_digit(affine, group, lo, step)
        if digit is not None:
            unit = divide(digit, lowest)
            return None if unit is None else g.mul(monomial_node(affine, g, unit), last)
        span = None if affine.uniform(lo) else _most_steps(affine, lo, hi)
        if span is not None:
            last = span
        elif not natural(lo):  # a step may stand below zero, and be one of more than the end says
            if not affine.uniform(lo):
                return None
            last = g.sub(last, lo)
        count = last if is_number(step, 1) else g.make("cdiv", (last, step))
        return g.mul(monomial_node(affine, g, unit), count)
    if len(group.terms) == 1 and var.node is not None and var.kind in ("vpid", "mod"):
        return var.node.attrs["count"] if var.kind == "vpid" else var.node.args[1]
    ranges = affine.ranges(var)
    return monomial_node(affine, g, times(unit, ranges[0])) if ranges else None


def _most_steps(affine: Affine, lo: Node, hi: Node) -> Node | None:
    """How far programs walk that each begin in a place of their own: all as far, but where a part is cut."""
    core = beneath(hi, "cast")
    ends = core.args if core.op == "minimum" else (hi,)
    spans = (_same_everywhere(affine, affine.g.sub(end, lo)) for end in ends)
    return next((span for span in spans if span is not None), None)


def _same_everywhere(affine: Affine, node: Node) -> Node | None:
    """A value of which what differs between programs cancels, without that."""
    form = nonzero(affine.terms(node, ()))
    if set(form) != {()}:
        return None
    total: Node | None = None
    for ids, factor in sorted(form[()].items(), key=lambda item: item[1] < 0):
        total = affine.g.signed(total, monomial_node(affine, affine.g, (abs(factor), ids)), factor)
    return total


def _start_digit(affine: Affine, group: Group, lo: Node, step: Node) -> Monomial | None:
    """The multiplier of a loop variable that starts at a program id: then it is below the loop's end,
    whatever the steps are."""
    if len(group.terms) < 2 or lo.op not in ("pid", "vpid"):
        return None
    (below, digit), (_, multiplier) = group.terms[-2:]
    steps = affine.terms(step, ()).get((), {})
    if below != affine.variable(lo, ()) or len(steps) != 1:
        return None
    ((ids, factor),) = steps.items()
    return digit if times(digit, (factor, ids)) == multiplier else None


def bounds_of(affine: Affine, mask: Node | None, rank: int) -> dict[frozenset, Node]:
    """Indices that a mask bounds from above: {terms of the index: bound}. Its block has `rank` axes."""
    g = affine.g
    found: dict[frozenset, Node] = {}
    for node, axes in comparisons(mask, rank):
        if node.attrs["cmp"] != "<":
            continue
        index, bound = node.args
        while index.op == "floordiv" and affine.uniform(index.args[1]) and natural(index.args[0]):
            index, bound = index.args[0], g.mul(bound, index.args[1])
        core = beneath(bound, "cast")
        for half in core.args if core.op == "minimum" else (bound,):  # below both of them
            for part in (half, *_each_below(g, half)):
                signature, rest = _index(affine, g.sub(index, part), axes)
                terms = [monomial_node(affine, g, (-factor, ids)) for ids, factor in rest.items()]
                if signature is not None and terms and (part is half or signature not in found):
                    found[signature] = functools.reduce(g.add, terms)
    return found


def _below_steps(affine: Affine, mask: Node | None, rank: int) -> dict[frozenset, Node]:
    """Indices that a mask keeps below the number of a loop's step, and so below the loop's end."""
    found: dict[frozenset, Node] = {}
    for node, axes in comparisons(mask, rank):
        index, number = node.args if node.attrs["cmp"] == "<" else node.args[::-1]
        step = beneath(number, "cast")
        if node.attrs["cmp"] not in ("<", ">") or step.op != "iv" or step.home.bounds is None:
            continue
        _, end, stride = step.home.bounds
        signature, rest = _index(affine, index, axes)
        upwards = stride.op == "const" and stride.value > 0 and affine.uniform(end)
        if signature is not None and upwards and not any(rest.values()):
            found[signature] = end
    return found


def _each_below(g: Graph, bound: Node) -> Iterator[Node]:
    """What a bound is not above: itself, or each with one side of a minimum in it."""
    core = beneath(bound, "cast")
    if core.op == "minimum":
        yield from (half for side in core.args for half in _each_below(g, side))
    elif core.op in ("add", "sub"):
        first, second = core.args
        others = list(_each_below(g, second)) if core.op == "add" else [second]
        operation = g.add if core.op == "add" else g.sub
        yield from (operation(half, other) for half in _each_below(g, first) for other in others)
    else:
        yield bound


def floors_of(affine: Affine, mask: Node | None, rank: int) -> set[frozenset]:
    """Indices that a mask keeps from being negative."""
    found = set()
    for node, axes in comparisons(mask, rank):
        low, high = node.args[::-1] if node.attrs["cmp"] == ">=" else node.args
        if node.attrs["cmp"] in (">=", "<=") and is_zero(low):
            signature, rest = _index(affine, high, axes)
            if signature is not None and not any(rest.values()):
                found.add(signature)
    return found


def _index(affine: Affine, node: Node, axes: tuple[int, ...]) -> tuple[frozenset | None, dict]:
    """The variable terms of a sum, None where they are no single variables, and its uniform part."""
    signature = set()
    rest: dict[tuple[int, ...], int] = {}
    for variables, coefficients in affine.terms(node, axes).items():
        coefficients = {ids: factor for ids, factor in coefficients.items() if factor}
        if not variables:
            rest = coefficients
        elif len(variables) == 1 and len(coefficients) == 1:
            ((ids, factor),) = coefficients.items()
            var = variables[0]
            signature.add((var.kind, var.key, (factor, ids)))  # type: ignore[union-attr]
        elif coefficients:
            return None, rest
    return frozenset(signature), rest


def monomial_node(affine: Affine, g: Graph, monomial: Monomial) -> Node:
    factor, ids = monomial
    node = g.const(factor)
    for i in ids:
        node = affine.nodes[i] if node.op == "const" and node.value == 1 else g.mul(affine.nodes[i], node)
    return node


def smaller(g: Graph, limit: Node, count: Node) -> Node:
    """The minimum of a bound and a count of whole blocks, unless the count is the bound rounded up."""
    if limit is count:
        return limit
    if count.op == "mul":
        for block, blocks in (count.args, count.args[::-1]):
            if blocks.op == "cdiv" and blocks.args[0] is limit and blocks.args[1] is block:
                return limit
    return g.make("minimum", (limit, count))

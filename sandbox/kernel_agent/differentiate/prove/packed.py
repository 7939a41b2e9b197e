"""Rows of packed sequences: where each begins is data, and yet no two programs have the same.

    row = bos + j        bos = load(cu + n), eos = load(cu + n + 1), 0 <= j < eos - bos

Where `cu` does not decrease, the sequences' rows are apart: a row determines n and j. Which n and which part
of it a program has is often data too, an entry of a table of pairs; where the pairs are all different, they
determine the program. Both are asked of the tensors before the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..ir.nodes import Node, Region, beneath, reachable, sides
from ..ir.nonnegative import natural
from ..ir.spelling import on_host
from .affine import Affine, Group, Monomial, Var, nonzero, times
from .masks import comparisons

TURNED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


@dataclass(frozen=True)
class Ordered:
    """Asked of a tensor of integers: none is less than the one before, nor the first than `least`."""

    name: str
    least: int | None = None


@dataclass(frozen=True)
class Distinct:
    """Asked of a tensor of integers in rows of `width`, at most two: the first rows, as many as there are
    programs along `axis`, differ, and no number is negative."""

    name: str
    width: int
    axis: int


@dataclass(frozen=True)
class AtMost:
    """Asked of a launch: it has no more programs along `axis`."""

    axis: int
    count: Node


@dataclass(frozen=True)
class Walked:
    """Asked of a launch: programs along `axis` that take every `step`-th of `tiles` have each once."""

    axis: int
    step: Node
    tiles: Node | None = None


Asked = Ordered | Distinct | AtMost | Walked


@dataclass
class Packed:
    """An address whose rows are found in data: its dimensions, what else it determines, what is asked."""

    groups: list[Group]
    behind: list[Group] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    open: list[Node] = field(default_factory=list)  # loaded numbers that have to be zero or more

    def terms(self) -> set[frozenset]:
        """Those of each dimension."""
        return {frozenset(group.terms) for group in self.groups}


def rows(affine: Affine, groups: list[Group], mask: Node | None, rank: int, region: Region | None) -> Packed:
    """The same dimensions, with those of packed rows as one variable each."""
    found = Packed(list(groups))
    bounds = list(_below_zero(affine, mask, rank, region))
    for form in bounds:
        for begin, end, rest in _sequences(affine, form):
            for at, group in enumerate(found.groups):
                unit = _unit(group, begin, rest)
                inner = None if unit is None else _within(affine, rest, form, bounds)
                index = affine.groups(begin.node.args[1])  # type: ignore[union-attr]
                if unit is None or inner is None or index is None:
                    continue
                name = begin.node.args[0].attrs["name"]  # type: ignore[union-attr]
                row = Var("row", (begin.key, end.key))
                beside = [(var, m) for var, m in group.terms if var != begin and var not in rest]
                found.groups[at] = Group(group.coefficient, [*beside, (row, unit)])
                found.behind += [Group((1, ()), list(rest.items())), *index]
                found.open += inner
                found.asked.append(Ordered(name))
                break
    return found


def by_heads(
    affine: Affine,
    offset: Node,
    mask: Node | None,
    region: Region | None,
    strides: frozenset[int],
) -> Packed | None:
    """The dimensions of an address in which every head has all rows of a sequence, one after another:

        bos * H + head * (eos - bos) + j        0 <= head < H, 0 <= j < eos - bos

    The heads of a sequence are what is between bos * H and eos * H. None where it is not such an address.
    """
    rank = len(offset.shape)
    form = nonzero(affine.terms(offset, tuple(range(rank))))
    bounds = list(_below_zero(affine, mask, rank, region))
    for begin, end, rest, bound in ((*found, one) for one in bounds for found in _sequences(affine, one)):
        heads = [key for key in form if len(key) == 2 and end in key]
        head = next((v for key in heads for v in key if v != end), None)
        left, right = form.get(_key(head, begin)), form.get(_key(head, end))
        if len(heads) != 1 or head is None or left is None or right is None or len(right) != 1:
            continue
        ((ids, factor),) = right.items()
        unit = (factor, ids)
        spans = [times(unit, count) for count in affine.ranges(head)]
        index = affine.groups(begin.node.args[1])  # type: ignore[union-attr]
        inner = _within(affine, rest, bound, bounds)
        mine = {(var,): times(unit, m) for var, m in rest.items()}
        if (
            left != {ids: -factor}
            or index is None
            or inner is None
            or all(form.get((begin,)) != {i: f} for f, i in spans)
            or any(form.get(key) != {i: f} for key, (f, i) in mine.items())
        ):
            continue
        gone = {_key(head, begin), _key(head, end), (begin,), *mine}
        row = Var("row", (begin.key, end.key))
        whole = affine.grouped(
            {key: c for key, c in form.items() if key not in gone} | {(row,): {ids: factor}}, strides
        )
        if whole is not None:
            behind = [Group((1, ()), list(rest.items())), Group((1, ()), [(head, (1, ()))]), *index]
            name = begin.node.args[0].attrs["name"]  # type: ignore[union-attr]
            return Packed(whole, behind, [Ordered(name)], inner)
    return None


def _key(*variables: Var | None) -> tuple:
    """The product of variables, as forms have it."""
    return tuple(sorted((v for v in variables if v is not None), key=lambda v: (v.kind, v.key)))


def programs(affine: Affine, packed: Packed, known: set) -> bool:
    """Learn of programs what pairs of a table determine; False where a number may be negative."""
    tables: dict[tuple, set[int]] = {}
    of: dict[Node, tuple] = {}
    for var in (v for group in packed.behind for v, _ in group.terms if (v.kind, v.key) in known):
        entry = _entry(affine, var.node)
        if entry is not None:
            table, column = entry
            tables.setdefault(table, set()).add(column)
            of[var.node] = table  # type: ignore[index]
    asked = set()
    for (name, width, program), columns in tables.items():
        axis = _axis(program)
        if len(columns) < width or axis is None:
            continue
        known.add((program.kind, program.key))
        asked.add((name, width, program))
        packed.asked.append(Distinct(name, width, axis))
    return all(of.get(node) in asked for node in packed.open)


def alone(affine: Affine, packed: Packed, known: set, axis: int, grid: tuple[int, ...] | None) -> bool:
    """Whether a launch has one program along an axis that the address of a packed row does not determine, or
    as many as the remainder in the address has values: a batch of packed sequences is one. That is asked."""
    if not packed.asked or grid is None:
        return False
    stored = list(
        reachable(affine.g.places, lambda n: [] if n.op == "mod" and _id(n.args[0], axis) else _parts(n))
    )
    if any(node.op == "pid" and node.attrs["axis"] == axis for node in stored):
        return False  # the forward has work for each
    remainders = {n.args[1] for n in stored if n.op == "mod" and _id(n.args[0], axis)}
    digits = [
        v.node
        for group in packed.groups + packed.behind
        for v, _ in group.terms
        if v.kind == "mod" and v.node is not None
    ]
    found = [] if remainders else [affine.g.one]
    for count in found + [
        node.args[1] for node in digits if node.args[1] in remainders and _id(node.args[0], axis)
    ]:
        most = affine.g.concrete(count)
        if on_host(count) and most is not None and (affine.g.elsewhere or grid[axis] <= most):
            packed.asked.append(AtMost(axis, count))
            known.add(("pid", (axis,)))
            return True
    return False


def _parts(node: Node) -> list[Node]:
    bounds = node.home.bounds if node.op == "iv" else None
    return [*node.args, *(sides(node) if node.op == "ifout" else ()), *(bounds or ())]


def _id(node: Node, axis: int) -> bool:
    whole = beneath(node, "cast")
    return whole.op == "pid" and whole.attrs["axis"] == axis


def _axis(program: Var) -> int | None:
    """The axis whose programs a variable numbers, all of them."""
    if program.kind == "pid":
        return program.key[0]
    count = program.node.attrs["count"]  # type: ignore[union-attr]
    return count.attrs["axis"] if count.op == "npid" else None


def _entry(affine: Affine, node: Node | None) -> tuple[tuple[str, int, Var], int] | None:
    """((table, width, program), column) of a number that is loaded at width * program + column."""
    if not _number(node):
        return None
    assert node is not None
    form = nonzero(affine.terms(node.args[1], ()))
    column = form.pop((), {}).get((), 0)
    match list(form.items()):
        case [((var,), factors)] if list(factors) == [()] and var.kind in ("pid", "vpid"):
            width = factors[()]
            if 0 <= column < width <= 2:
                return (node.args[0].attrs["name"], width, var), column
    return None


def _number(node: Node | None) -> bool:
    """Whether a value is one integer that is loaded from an argument, whatever else is so."""
    return (
        node is not None and node.op == "load" and not node.shape and not node.is_float
        and (len(node.args) == 2 or "before" in node.attrs) and node.args[0].op == "param"
    )  # fmt: skip


def _below_zero(
    affine: Affine, mask: Node | None, rank: int, region: Region | None
) -> Iterator[dict[tuple, dict[tuple[int, ...], int]]]:
    """Sums of single variables that are below zero where the mask and the branches around it hold."""
    asked = [(node, axes, True) for node, axes in comparisons(mask, rank)]
    for around in region.chain() if region is not None else ():
        if around.cond is not None and not around.cond.shape:
            asked.append((around.cond, (), around.positive))
    for condition, axes, holds in asked:
        node = beneath(condition, "cast")
        while node.op == "not":
            node, holds = beneath(node.args[0], "cast"), not holds
        if node.op != "compare" or node.attrs["cmp"] not in TURNED or node.args[0].is_float:
            continue
        cmp = node.attrs["cmp"] if holds else TURNED[node.attrs["cmp"]]
        low, high = node.args if cmp in ("<", "<=") else node.args[::-1]
        form = affine.terms(affine.g.sub(low, high), axes)
        if cmp in ("<=", ">="):
            form.setdefault((), {})[()] = form.get((), {}).get((), 0) - 1
        form = nonzero(form)
        if all(len(variables) < 2 and len(c) == 1 for variables, c in form.items()):
            yield form


def _sequences(affine: Affine, form: dict) -> Iterator[tuple[Var, Var, dict[Var, Monomial]]]:
    """(begin, end, rest) where a form is begin + rest - end, and the last two stand beside each other."""
    terms = {variables[0]: next(iter(c.items())) for variables, c in form.items() if variables}
    ones = {v: factor for v, (ids, factor) in terms.items() if ids == () and _number(v.node)}
    for begin in (v for v, factor in ones.items() if factor == 1):
        for end in (v for v, factor in ones.items() if factor == -1):
            if begin.node.args[0] is not end.node.args[0]:
                continue
            gap = affine.terms(affine.g.sub(end.node.args[1], begin.node.args[1]), ())
            if nonzero(gap) == {(): {(): 1}}:
                rest = {v: (f, ids) for v, (ids, f) in terms.items() if v not in (begin, end)}
                yield begin, end, rest


def _unit(group: Group, begin: Var, rest: dict[Var, Monomial]) -> Monomial | None:
    """The multiplier of rows in a dimension that has them."""
    terms = dict(group.terms)
    unit = terms.get(begin)
    if unit is None or any(terms.get(var) != times(unit, m) for var, m in rest.items()):
        return None
    return unit


def _within(affine: Affine, rest: dict[Var, Monomial], form: dict, bounds: list[dict]) -> list[Node] | None:
    """What has to be zero or more so that a row does not stand before its sequence; None where that is not
    known. The row's number is that of the form, `shift` more than its variables say."""
    shift = form.get((), {}).get((), 0)
    if set(form.get((), {})) > {()}:
        return None
    negative = {(v,): {ids: -f} for v, (f, ids) in rest.items()}
    for other in bounds:
        variables = {key: c for key, c in other.items() if key}
        constant = other.get((), {})
        least = constant.get((), 0) + 1  # -rest + constant < 0: rest > constant
        if variables == negative and set(constant) <= {()} and shift + least >= 0:
            return []
    if shift < 0 or any(f < 0 for f, _ in rest.values()):
        return None
    inner: list[Node] = []
    for var in rest:
        if var.kind == "opaque" and _number(var.node):
            inner.append(var.node)  # type: ignore[arg-type]
        elif var.node is not None and not natural(var.node):
            return None
    return inner

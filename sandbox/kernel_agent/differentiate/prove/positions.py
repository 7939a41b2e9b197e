"""What an address dimension adds up: positions of lanes and programs, their digits, and loops over taps.

A position is a number that one lane of one program (or one step of a loop) stands at: `pid * BLOCK + lane`,
`start + lane`, a program id alone. A kernel may split a position into digits by `//` and `%`: a row of
patches into batch, line and column. A mask bounds a position or a sum of positions from above and below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..ir.graph import Graph
from ..ir.nodes import Node, Region, beneath
from ..ir.report import Why
from ..ir.simplify import is_zero
from ..ir.values import quotient
from .affine import Affine, Axes, Form, Group, Monomial, Var, divide, nonzero, times
from .disjoint import monomial_node, smaller
from .masks import conjuncts

ORDERED = {"<": (1, 0), "<=": (1, -1), ">": (-1, 0), ">=": (-1, -1)}  # left - right: sign, less what


class NotTurned(Exception):
    """A value that cannot be had at other positions; carries a `Why`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.why = Why(kind, text)


def narrow(g: Graph, node: Node, axes: Axes) -> tuple[Node, Axes]:
    """A comparison with a number, before it was given axes of length 1."""
    while node.op == "compare" and node.args[0].op == "expand" and not node.args[1].shape:
        at, inner = node.args[0].attrs["axis"], node.args[0].args[0]
        node = g.make("compare", (inner, node.args[1]), node.attrs, "int1")
        axes = (*axes[:at], *axes[at + 1 :])
    return node, axes


@dataclass(eq=False)
class Position:
    """Sum of multiplier * variable below `count`, along `axis` of the block in blocks of `block`."""

    terms: dict[Var, Monomial]
    count: Node
    axis: int | None = None
    block: Node | None = None
    entries: list[Entry] = field(default_factory=list)
    limit: Condition | None = None  # the part of the mask that says so
    equal: tuple[Node, Node] | None = None  # a count of programs that must be the steps between them
    summed: Entry | None = None  # the lowest digit, if lanes count it and are added up: no address holds it

    @property
    def axes(self) -> Axes:
        return () if self.axis is None else (self.axis,)

    @property
    def programs(self) -> list[Node]:
        return [v.node for v in self.terms if v.kind == "vpid" and v.node is not None]

    @property
    def region(self) -> Region | None:
        return next((v.region for v in self.terms if v.region is not None), None)


@dataclass(eq=False)
class Entry:
    """One summand of an index: multiplier * (a position, a digit of it, or a loop's count of steps)."""

    terms: dict[Var, Monomial]
    multiplier: Monomial
    size: Node | None  # one more than the highest value; None: the highest digit
    position: Position | None = None
    low: Monomial = (1, ())  # what the digit counts

    @property
    def var(self) -> Var:
        return next(iter(self.terms))


@dataclass
class Condition:
    """One of the conditions that a mask is the conjunction of, along some axes of the block."""

    node: Node
    axes: Axes


def conditions(g: Graph, mask: Node | None, rank: int) -> list[Condition]:
    """The conditions of a mask of a block with `rank` axes, also of parts that were expanded together."""
    return [Condition(*narrow(g, node, axes)) for node, axes in conjuncts(mask, rank)]


class Bounds:
    """What a mask says about sums of variables."""

    def __init__(self, g: Graph, affine: Affine, mask: Node | None, rank: int) -> None:
        self.g, self.affine = g, affine
        self.found: list[tuple[dict[Var, Monomial], Form, Condition | None]] = []
        for condition in conditions(g, mask, rank):
            node = beneath(condition.node, "cast")
            if node.op == "compare" and node.attrs["cmp"] in ORDERED and not node.args[0].is_float:
                self._note(node, condition)

    def _note(self, node: Node, condition: Condition) -> None:
        sign, less = ORDERED[node.attrs["cmp"]]
        a, b = node.args if sign > 0 else node.args[::-1]
        sides = b.args if b.op == "minimum" else (b,)  # below a minimum is below both
        for low in sides:
            form = nonzero(self.affine.terms(self.g.make("sub", (a, low)), condition.axes))  # type: ignore[arg-type]
            terms: dict[Var, Monomial] = {}
            uniform: Form = {(): dict(form.get((), {}))}
            for variables, coefficients in form.items():
                if len(variables) > 1 or (variables and len(coefficients) > 1):
                    break
                if variables:
                    ((ids, factor),) = coefficients.items()
                    terms[variables[0]] = (factor, ids)
            else:
                uniform[()][()] = uniform[()].get((), 0) + less
                if terms:
                    self.found.append((terms, uniform, condition if len(sides) == 1 else None))

    def upper(self, terms: dict[Var, Monomial]) -> tuple[Form, Condition | None] | None:
        """u with sum < u under the mask."""
        for known, rest, condition in self.found:
            if known == terms:
                return {(): {ids: -f for ids, f in rest[()].items()}}, condition
        return None

    def lower(self, terms: dict[Var, Monomial]) -> tuple[Form, Condition | None] | None:
        """l with l <= sum under the mask."""
        negative = {var: (-factor, ids) for var, (factor, ids) in terms.items()}
        for known, rest, condition in self.found:
            if known == negative:  # rest - sum < 0
                form = dict(rest[()])
                form[()] = form.get((), 0) + 1
                return {(): form}, condition
        return None


class Reader:
    """Finds the entries of address dimensions, and the positions they belong to."""

    def __init__(self, g: Graph, affine: Affine, mask: Node | None, rank: int) -> None:
        self.g, self.affine = g, affine
        self.bounds = Bounds(g, affine, mask, rank)
        self.positions: dict[frozenset, Position] = {}

    def entries(self, group: Group) -> list[Entry]:
        rest = dict(group.terms)
        found: list[Entry] = []
        for var, multiplier in group.terms:
            if var.kind != "lane":
                continue
            del rest[var]
            spans = [times(multiplier, r) for r in self.affine.ranges(var)]
            for other, scale in list(rest.items()):
                if other.kind in ("vpid", "trip") and scale in spans:
                    unit = divide(scale, multiplier)
                    assert unit is not None
                    terms = {other: unit, var: (1, ())}
                    stride = self._strided(other, unit, multiplier, rest)
                    if stride is not None:
                        terms = {other: unit, stride: rest.pop(stride), var: (1, ())}
                        terms[stride] = divide(terms[stride], multiplier)  # type: ignore[assignment]
                    del rest[other]
                    found.append(self._of(terms, multiplier))
                    break
            else:
                found.append(self._of({var: (1, ())}, multiplier))
        for var, multiplier in rest.items():
            if var.kind == "vpid":
                found.append(self._of({var: (1, ())}, multiplier))
            elif var.kind == "trip":
                found.append(Entry({var: (1, ())}, multiplier, self._trips(var)))
            elif var.kind in ("floordiv", "mod"):
                found.append(self._digit(var, multiplier))
            else:
                raise NotTurned("mixed", "its address is no sum of positions and loops")
        return found

    def _strided(self, program: Var, unit: Monomial, multiplier: Monomial, rest: dict) -> Var | None:
        """A loop from a program's block over those of the others: `range(pid * B, n, programs * B)`."""
        for var, scale in rest.items():
            if var.kind != "trip" or program.kind != "vpid":
                continue
            lo, _, step = var.region.bounds  # type: ignore[union-attr]
            start = nonzero(self.affine.terms(self.affine.start(lo), ()))
            steps = self.affine.monomials(step)
            if start == {(program,): {unit[1]: unit[0]}} and steps and times(multiplier, steps[0]) == scale:
                return var
        return None

    def _blocks(self, terms: dict[Var, Monomial], block: Node) -> tuple[Node, tuple[Node, Node]]:
        """(count, equal) of a position that programs and the steps of their loops share."""
        program = next(v for v in terms if v.kind == "vpid")
        stride = next(v for v in terms if v.kind == "trip")
        _, hi, _ = stride.region.bounds  # type: ignore[union-attr, misc]
        between = divide(terms[stride], terms[program])
        if not self.affine.uniform(hi) or between is None:
            raise NotTurned("bounds", "a loop in its address has bounds that differ between programs")
        count = self.g.mul(block, self.g.make("cdiv", (hi, block)))
        assert program.node is not None
        return count, (program.node.attrs["count"], monomial_node(self.affine, self.g, between))

    def _of(self, terms: dict[Var, Monomial], multiplier: Monomial) -> Entry:
        position = self._position(terms)
        entry = Entry(position.terms, multiplier, position.count, position)
        position.entries.append(entry)
        return entry

    def _position(self, terms: dict[Var, Monomial]) -> Position:
        key = frozenset(terms.items())
        if key in self.positions:
            return self.positions[key]
        g = self.g
        lane = next((v for v in terms if v.kind == "lane"), None)
        other = next((v for v in terms if v.kind != "lane"), None)
        block = None
        if lane is not None:
            assert lane.node is not None
            if not is_zero(lane.node.args[0]):
                raise NotTurned("mixed", "its lanes do not count from 0")
            block = lane.node.args[1]
        count, equal = block if block is not None else g.one, None
        if block is not None and len(terms) == 3:
            count, equal = self._blocks(terms, block)
        elif other is not None and other.kind == "vpid":
            assert other.node is not None
            count = g.mul(count, other.node.attrs["count"])
        elif other is not None:
            count = g.mul(count, self._trips(other))
        bound = self.bounds.upper(terms)
        if bound is not None:
            count = smaller(g, self.uniform(bound[0]), count)
        found = Position(terms, count, None if lane is None else lane.key[0], block)
        found.limit, found.equal = None if bound is None else bound[1], equal
        self.positions[key] = found
        return found

    def _trips(self, var: Var) -> Node:
        lo, hi, step = var.region.bounds  # type: ignore[union-attr, misc]
        if not is_zero(lo) or not self.affine.uniform(hi) or not self.affine.uniform(step):
            raise NotTurned("bounds", "a loop in its address has bounds that differ between programs")
        return self.g.make("cdiv", (hi, step))

    def _digit(self, var: Var, multiplier: Monomial) -> Entry:
        assert var.node is not None
        root, low, size = self._split(var.node)
        no_position = NotTurned("mixed", f"what `{var.node.hint or var.kind}` is a digit of is no position")
        form = nonzero(self.affine.terms(root, var.key[1]))
        terms: dict[Var, Monomial] = {}
        for variables, coefficients in form.items():
            if len(variables) != 1 or len(coefficients) != 1:
                raise no_position
            ((ids, factor),) = coefficients.items()
            terms[variables[0]] = (factor, ids)  # type: ignore[index]
        lanes = [v for v in terms if v.kind == "lane"]
        others = [v for v in terms if v.kind in ("vpid", "trip")]
        if len(lanes) > 1 or len(others) > 1 or len(lanes) + len(others) != len(terms):
            raise no_position
        spans = (self.affine.ranges(lanes[0]) if lanes else [(1, ())]) if others else []
        if any(terms[v] != (1, ()) for v in lanes) or any(terms[v] not in spans for v in others):
            raise no_position
        position = self._position(terms)
        entry = Entry({var: (1, ())}, multiplier, size, position, low)
        position.entries.append(entry)
        return entry

    def _split(self, node: Node) -> tuple[Node, Monomial, Node | None]:
        """(whole, low, size): the node is whole // low % size; size None where nothing is cut off above."""
        if node.op == "cast":
            return self._split(node.args[0])
        if node.op not in ("floordiv", "mod"):
            return node, (1, ()), None
        whole, low, size = self._split(node.args[0])
        divisor = node.args[1]
        steps = self.affine.monomials(divisor)
        part = divisor if size is None else quotient(self.g, size, divisor)
        if len(steps) != 1 or part is None:
            raise NotTurned("mixed", f"`{node.hint or node.op}` cuts digits that do not divide each other")
        if node.op == "mod":
            return whole, low, divisor
        return whole, times(low, steps[0]), None if size is None else part

    def uniform(self, form: Form) -> Node:
        """A sum of values that are the same everywhere."""
        g = self.g
        total: Node | None = None
        for ids, factor in sorted(form.get((), {}).items(), key=lambda item: (item[1] < 0, not item[0])):
            if not factor:
                continue
            term = monomial_node(self.affine, g, (abs(factor), ids))
            total = g.signed(total, term, factor)
        return g.const(0) if total is None else total


def completed(g: Graph, affine: Affine, position: Position, few: Callable[[Node], bool]) -> bool:
    """Add the digits of a position that the address leaves out; whether all together are the position."""
    if position.axis is None or position.equal is not None:
        return False
    reach: Monomial | None = (1, ())
    for entry in _ordered(position):
        gap = None if reach is None else divide(entry.low, reach)
        if gap is None:
            return False
        if gap != (1, ()):
            added = Entry({}, (0, ()), monomial_node(affine, g, gap), position, reach)  # type: ignore[arg-type]
            position.entries.append(added)
            if reach == (1, ()) and not few(added.size):  # type: ignore[arg-type]
                position.summed = added  # lanes count it; a few elements are walked by a loop
        sizes = affine.monomials(entry.size) if entry.size is not None else []
        reach = times(entry.low, sizes[0]) if len(sizes) == 1 else None
    if reach is not None:
        position.entries.append(Entry({}, (0, ()), None, position, reach))
    return chained(affine, position)


def _ordered(position: Position) -> list[Entry]:
    return sorted(position.entries, key=lambda e: (len(e.low[1]), e.low[0]))


def chained(affine: Affine, position: Position) -> bool:
    """Whether the entries of a position are all its digits: together they are the position."""
    reach: Monomial | None = (1, ())
    for entry in _ordered(position):
        if entry.low != reach:
            return False
        if entry.size is None or entry.terms is position.terms:
            reach = None
        else:
            sizes = affine.monomials(entry.size)
            reach = times(entry.low, sizes[0]) if len(sizes) == 1 else (0, ())
    return reach is None

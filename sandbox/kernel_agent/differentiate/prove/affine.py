"""Addresses as sums of coefficient times variable, and when such a sum is injective.

A variable is what differs between programs, iterations and lanes: a program id, the trip count of a loop, a
lane of a block, or the quotient and remainder of one of them. Coefficients and ranges are products of values
that are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

from ..ir.graph import Graph
from ..ir.nodes import Node, Region, sides
from ..ir.nonnegative import natural

Monomial = tuple[int, tuple[int, ...]]  # integer factor, sorted ids of uniform nodes


@dataclass(frozen=True)
class Var:
    """kind: pid, trip, lane, floordiv, mod, opaque. `node` is the node it stands for (None for trips)."""

    kind: str
    key: tuple
    node: Node | None = field(compare=False, default=None)
    region: Region | None = field(compare=False, default=None)


@dataclass
class Group:
    """Terms of one address dimension: index = sum(multiplier * variable), address += coefficient * index."""

    coefficient: Monomial
    terms: list[tuple[Var, Monomial]]
    solved: bool = False


class Affine:
    """Decomposes integer nodes of one graph."""

    def __init__(
        self, g: Graph, absolute: bool = False, start: Callable[[Node], Node] = lambda lo: lo
    ) -> None:
        """`start`: where a loop begins, in terms of the variables that the other nodes have."""
        self.g, self.start = g, start
        self.absolute = absolute  # loops that start at different places count their steps from zero
        self.nodes: dict[int, Node] = {}

    # sums of products

    def terms(
        self, node: Node, axes: tuple[int, ...]
    ) -> dict[tuple[Var | None, ...], dict[tuple[int, ...], int]]:
        """{variables: {uniform ids: factor}}; `axes`: which axes of the whole block those of `node` are."""
        if node.op == "const" and isinstance(node.value, int):
            return {(): {(): int(node.value)}}
        if node.op in ("add", "sub", "mul"):
            left, right = (self.terms(a, axes[len(axes) - len(a.shape) :]) for a in node.args)
            if node.op == "mul":
                return _product(left, right)
            return _combine(left, right, 1 if node.op == "add" else -1)
        if node.op == "neg":
            return _combine({}, self.terms(node.args[0], axes), -1)
        if node.op == "broadcast" or (node.op == "cast" and not node.args[0].is_float):  # that would cut off
            return self.terms(node.args[0], axes[len(axes) - len(node.args[0].shape) :])
        if node.op == "expand":
            at = node.attrs["axis"]
            return self.terms(node.args[0], (*axes[:at], *axes[at + 1 :]))
        if node.op == "full" and isinstance(node.args[0].value, int):
            return {(): {(): int(node.args[0].value)}}
        if node.op == "iv":
            return self._loop_variable(node)
        if self.uniform(node):
            self.nodes[node.id] = node
            return {(): {(node.id,): 1}}
        return {(self.variable(node, axes),): {(): 1}}

    def _loop_variable(self, node: Node) -> dict:
        region = node.home
        lo, _, step = region.bounds  # type: ignore[misc]
        trip = {(Var("trip", (id(region),), None, region),): {(): 1}}
        start = {} if self.absolute and not self.uniform(lo) else self.terms(self.start(lo), ())
        return _combine(start, _product(self.terms(step, ()), trip), 1)

    def variable(self, node: Node, axes: tuple[int, ...]) -> Var:
        if node.op in ("pid", "vpid"):
            return Var(node.op, (node.attrs["axis"],), node)
        if node.op == "arange" and axes:
            return Var("lane", (axes[0], node.id), node)
        if node.op in ("floordiv", "mod"):
            return Var(node.op, (node.id, axes), node)
        return Var("opaque", (node.id, axes), node)

    def uniform(self, node: Node) -> bool:
        """The same in every program, iteration and lane."""
        if node.op in ("const", "constexpr", "param", "npid"):
            return True
        if node.op in ("pid", "vpid", "iv", "phi", "load", "arange", "loopout", "random") or node.shape:
            return False
        if node.op == "ifout":
            return self.uniform(node.args[0]) and all(map(self.uniform, sides(node)))
        return bool(node.args) and all(map(self.uniform, node.args))

    def groups(self, node: Node, strides: frozenset[int] = frozenset()) -> list[Group] | None:
        """The address dimensions of an offset, or None where it is not a sum of single variables. `strides`:
        constexprs that name a dimension, as run-time values do."""
        return self.grouped(self.terms(node, tuple(range(len(node.shape)))), strides)

    def grouped(self, form: Form, strides: frozenset[int] = frozenset()) -> list[Group] | None:
        """The same of a sum."""
        found: dict[tuple[int, ...], list[tuple[Var, Monomial]]] = {}
        for variables, coefficients in nonzero(form).items():
            if not variables:
                continue
            if len(variables) > 1 or len(coefficients) > 1:
                return None
            ((ids, factor),) = coefficients.items()
            base = self._stride_part(ids, strides)
            rest = divide((factor, ids), (1, base))
            assert rest is not None
            found.setdefault(base, []).append((variables[0], rest))
        return [Group((1, base), terms) for base, terms in found.items()]

    def solved(self, node: Node) -> list[Group] | None:
        """The address dimensions of an offset, each a sum of digits; None where they are not."""
        for strides in (frozenset[int](), self.strides(node)):
            groups = self.groups(node, strides)
            if groups is not None and all(map(self.solve, groups)):
                return groups
        return None

    def _stride_part(self, ids: tuple[int, ...], strides: frozenset[int]) -> tuple[int, ...]:
        """Run-time factors name an address dimension; constexpr factors are block sizes inside one."""
        return tuple(i for i in ids if i in strides or not self._compile_time(self.nodes[i]))

    def strides(self, node: Node) -> frozenset[int]:
        """Constexprs that an offset has as factors, and that are the size of none of its indices: the number
        of columns, say."""
        factors, sizes = set[int](), set[int]()
        for variables, coefficients in self.terms(node, tuple(range(len(node.shape)))).items():
            factors.update(i for ids in coefficients for i in ids)
            sizes.update(i for var in variables if var for r in self.ranges(var) for i in r[1])
        return frozenset(i for i in factors - sizes if self._named(self.nodes[i]))

    def _named(self, node: Node) -> bool:
        """A constexpr, or what is computed of some: half a head, say."""
        return node.op == "constexpr" or (bool(node.args) and self._compile_time(node))

    def _compile_time(self, node: Node) -> bool:
        if node.op == "constexpr" and node.attrs["name"] in self.g.strides:
            return False
        return node.op in ("const", "constexpr", "npid") or (
            bool(node.args) and all(map(self._compile_time, node.args))
        )

    def monomials(self, node: Node) -> list[Monomial]:
        """A range as products: both sides of a minimum are upper bounds."""
        if node.op == "minimum":
            return [m for arg in node.args for m in self.monomials(arg)]
        terms = self.terms(node, ())
        flat = [(f, ids) for ids, f in terms.get((), {}).items() if f]
        return flat if len(flat) == 1 and not any(terms) else []

    def ranges(self, var: Var) -> list[Monomial]:
        """Exclusive upper bounds of a variable that is never negative."""
        node = var.node
        if var.kind == "trip" and var.region is not None:
            lo, hi, step = var.region.bounds  # type: ignore[misc]
            plain = _is(lo, 0) and _is(step, 1) and self.uniform(hi)
            return self.monomials(hi) if plain else []
        if node is None:
            return []
        if var.kind == "lane":
            return self.monomials(node.args[1]) if _is(node.args[0], 0) else []
        if var.kind == "vpid":
            return self.monomials(node.attrs["count"])
        if var.kind == "mod":
            return self.monomials(node.args[1]) if natural(node.args[0]) else []
        if var.kind == "pid":
            count = self.g.npid(node.attrs["axis"])
        elif var.kind == "floordiv" and node.args[0].op == "pid" and self.uniform(node.args[1]):
            count = self.g.make("cdiv", (self.g.npid(node.args[0].attrs["axis"]), node.args[1]))
        else:
            return []
        self.nodes[count.id] = count
        return [(1, (count.id,))]

    def solve(self, group: Group) -> bool:
        """Whether the terms are digits: each multiplier at least the span of all smaller ones."""
        for order in permutations(group.terms) if len(group.terms) <= 5 else ():
            spans = [order[0][1]]
            for var, multiplier in order:
                if multiplier not in spans:
                    break
                spans = [times(multiplier, r) for r in self.ranges(var)]
            else:
                group.terms, group.solved = list(order), True
                return True
        return False


def _is(node: Node, number: int) -> bool:
    return node.op == "const" and node.value == number


def _combine(a: dict, b: dict, sign: int) -> dict:
    out = {variables: dict(cs) for variables, cs in a.items()}
    for variables, cs in b.items():
        target = out.setdefault(variables, {})
        for ids, factor in cs.items():
            target[ids] = target.get(ids, 0) + sign * factor
    return out


def _product(a: dict, b: dict) -> dict:
    out: dict = {}
    for va, ca in a.items():
        for vb, cb in b.items():
            variables = tuple(sorted((*va, *vb), key=lambda v: (v.kind, v.key)))
            target = out.setdefault(variables, {})
            for ia, fa in ca.items():
                for ib, fb in cb.items():
                    ids = tuple(sorted((*ia, *ib)))
                    target[ids] = target.get(ids, 0) + fa * fb
    return out


def times(a: Monomial, b: Monomial) -> Monomial:
    return a[0] * b[0], tuple(sorted((*a[1], *b[1])))


def divide(a: Monomial, b: Monomial) -> Monomial | None:
    """a / b, None where it is not a product again."""
    if b[0] == 0 or a[0] % b[0]:
        return None
    rest = list(a[1])
    for i in b[1]:
        if i not in rest:
            return None
        rest.remove(i)
    return a[0] // b[0], tuple(rest)


def upper(g: Graph, node: Node) -> Node | None:
    """The same for all programs, and not below `node` in any; sizes and strides are taken to be positive."""
    return _bound(g, node, True)


def _bound(g: Graph, node: Node, high: bool) -> Node | None:
    if node.op in ("const", "constexpr", "param", "npid"):
        return node
    if node.op == "pid":
        count = g.intern("npid", (), node.attrs, "int32", ())
        return g.sub(count, g.const(1)) if high else g.const(0)
    if node.op == "cast":
        return None if node.args[0].is_float else _bound(g, node.args[0], high)
    if node.op == "neg":
        inner = _bound(g, node.args[0], not high)
        return None if inner is None else g.neg(inner)
    if node.op == "ifout" and node.attrs["if"].static:
        bounds = [b for b in (_bound(g, side, high) for side in sides(node)) if b is not None]
        if len(bounds) < 2:
            return None
        one, two = bounds
        return one if one is two else g.make("select", (node.args[0], one, two), {}, node.dtype, ())
    if node.op not in ("add", "sub", "mul", "minimum", "maximum", "cdiv", "floordiv"):
        return None
    a, b = node.args
    left = _bound(g, a, high)
    right = _bound(g, b, high != (node.op in ("sub", "cdiv", "floordiv")))
    if node.op == ("minimum" if high else "maximum") and (left is None or right is None):
        return left if left is not None else right
    if left is None or right is None:
        return None
    return g.make(node.op, (left, right), node.attrs, node.dtype, node.shape)


Axes = tuple[int | None, ...]


Form = dict[tuple, dict[tuple[int, ...], int]]


def nonzero(form: Form) -> Form:
    """A sum of products without the terms that cancel."""
    kept = {v: {ids: f for ids, f in cs.items() if f} for v, cs in form.items()}
    return {v: cs for v, cs in kept.items() if cs}

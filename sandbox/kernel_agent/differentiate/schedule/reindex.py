"""Evaluate a value of a kernel at other positions than its lanes and programs stand at.

A *place* says that a sum of variables (`pid * BLOCK + lane`) has a new value. Integer parts of a value that
consist of places are replaced, and everything else is made again around them. A program id or a lane that is
used apart from its place cannot be replaced: then the value is refused. Each node is followed together with
the axes of the written block that its own axes are, so that a block index inside a sum over its lanes stays
what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ...source import words
from ..ir.graph import Graph
from ..ir.kinds import LANEWISE
from ..ir.nodes import If, Node, Region, nodes_in
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..prove.affine import Affine, Axes, Form, Monomial, Var, divide, nonzero, times
from ..prove.disjoint import monomial_node
from ..prove.positions import NotTurned, narrow

ELEMENTWISE = LANEWISE - {"expand"} | words(
    "pow floordiv mod cdiv clamp select compare and or xor not land lor shl shr invert full load random"
)
SUMS = ("add", "sub", "mul", "neg", "cast", "expand", "broadcast")
VARIABLES = ("arange", "vpid", "iv")


@dataclass
class Place:
    """Sum of multiplier * variable along an axis of the written block (None: a number); its new value."""

    terms: dict[Var, Monomial]
    node: Node
    axis: int | None


def lift(g: Graph, node: Node, axes: Axes, wanted: Axes) -> Node:
    """A block over `axes` as a block over `wanted`, with length 1 along the others."""
    if not node.shape:
        return node
    for at, axis in enumerate(wanted):
        if axis not in axes:
            node = g.expand(node, at)
    return node


class Sums:
    """Sums of products as nodes again."""

    def __init__(self, g: Graph, affine: Affine) -> None:
        self.g, self.affine = g, affine

    def variable(self, var: Var, axes: Axes) -> tuple[Node, Monomial]:
        """The node of a variable, and how many of the variable it counts for one."""
        if var.kind == "trip":
            lo, _, step = var.region.bounds  # type: ignore[union-attr, misc]
            steps = self.affine.monomials(step)
            if not is_zero(lo) or len(steps) != 1:
                raise NotTurned("bounds", "a loop in its address does not start at 0")
            return var.region.iv, steps[0]  # type: ignore[union-attr, return-value]
        assert var.node is not None
        own: Axes = (var.key[0],) if var.kind == "lane" else var.key[1] if len(var.key) > 1 else ()
        return lift(self.g, var.node, own, axes), (1, ())

    def node(self, form: Form, axes: Axes, dtype: str) -> Node:
        g = self.g
        total: Node | None = None
        for variables, coefficients in sorted(nonzero(form).items(), key=lambda item: not item[0]):
            for ids, factor in coefficients.items():
                monomial, term = (abs(factor), ids), None
                for var in variables:
                    node, unit = self.variable(var, axes)
                    rest = divide(monomial, unit)
                    if rest is None:
                        raise NotTurned("mixed", "a loop in its address is divided")
                    monomial, term = rest, node if term is None else g.mul(term, node)
                if term is not None and dtype == "int64":
                    term = g.cast(term, dtype)
                scale = monomial_node(self.affine, g, monomial)
                term = scale if term is None else g.mul(scale, term)
                total = g.signed(total, term, factor)
        return g.const(0) if total is None else total


def split(form: Form, place: Place) -> tuple[Monomial, Form] | None:
    """(c, rest) with form = c * place + rest."""
    first, unit = next(iter(place.terms.items()))
    found = form.get((first,), {})
    if len(found) != 1:
        return None
    ((ids, factor),) = found.items()
    c = divide((factor, ids), unit)
    if c is None:
        return None
    rest = dict(form)
    for var, multiplier in place.terms.items():
        factor, ids = times(c, multiplier)
        if rest.pop((var,), None) != {ids: factor}:
            return None
    return c, rest


class Reindex:
    """Rebuilds values with `places` in force; `gone` are variables that nothing may mention afterwards."""

    def __init__(
        self, g: Graph, affine: Affine, tiles: Rewriter, places: list[Place], gone: set[Var], here: Region
    ) -> None:
        self.g, self.affine, self.tiles, self.places, self.gone, self.here = (
            g, affine, tiles, places, gone, here,
        )  # fmt: skip
        self.axes = {place.axis for place in places if place.axis is not None}  # along which lanes have moved
        self.nodes = {v.node if v.region is None else v.region.iv for v in gone}
        self.sums = Sums(g, affine)
        self.known: dict[tuple[Node, Axes], Node] = {}  # conditions that are decided otherwise
        # Reads what another kernel stores.
        self.kept: Callable[[Node, Axes], Node | None] = lambda node, axes: None
        self.memo: dict[tuple[Node, Axes, Region], Node | NotTurned] = {}
        self.branches: dict[If, If] = {}
        self.touched: dict[Node, bool] = {}

    def node(self, node: Node, axes: Axes) -> Node:
        """`node`, a block over `axes` of the written block, at the new places."""
        key = (node, axes, self.here)
        if key not in self.memo:
            with self.g.at(self.here):
                try:
                    self.memo[key] = self._made(node, axes)
                except NotTurned as failure:
                    self.memo[key] = failure
        found = self.memo[key]
        if isinstance(found, NotTurned):
            raise found
        return found

    def touches(self, node: Node) -> bool:
        """Whether a value may depend on what has moved: any lane may."""
        if node not in self.touched:
            self.touched[node] = any(
                n in self.nodes or n.op == "arange" or self.tiles.replace(n) is not None
                for n in nodes_in([node])
            )
        return self.touched[node]

    def _made(self, node: Node, axes: Axes) -> Node:
        if not node.is_float:
            node = self.tiles.node(node)
        kept = self.kept(node, axes)
        if kept is not None:
            return kept
        if not self.touches(node):
            return node
        asked, inner = narrow(self.g, node, axes)
        if (asked, inner) in self.known:
            return lift(self.g, self.known[asked, inner], inner, axes)
        number = not node.is_float and node.dtype != "int1"
        if number and node.op in (*SUMS, *VARIABLES, "floordiv", "mod"):
            moved = self._moved(node, axes, True)
            if moved is not None:
                return moved
        if node.op == "arange":
            if axes[0] in self.axes:
                raise NotTurned("mixed", "it uses the lanes of a block apart from its position")
            return node
        if node.op in VARIABLES:
            if node in self.nodes:
                why = f"it uses `{node.hint or node.op}` apart from the position it is part of"
                raise NotTurned("mixed", why)
            return node
        if node.op == "ifout" and node.attrs["if"].static:
            return self._choice(node, axes)
        try:
            return self._again(node, axes)
        except NotTurned:
            moved = self._moved(node, axes, False) if number and node.op in SUMS else None
            if moved is None:
                raise
            return moved

    def _moved(self, node: Node, axes: Axes, plain: bool) -> Node | None:
        """An integer as a sum of places and what stays; with `plain`, only one place and what is uniform."""
        g = self.g
        form = nonzero(self.affine.terms(node, axes))  # type: ignore[arg-type]
        parts: list[Node] = []
        for place in self.places:
            found = split(form, place)
            if found is None:
                continue
            c, form = found
            at = lift(g, place.node, (place.axis,), axes)
            parts.append(g.mul(monomial_node(self.affine, g, c), at))
        if not parts or any(self._moves(var) for variables in form for var in variables):
            return None
        if plain and (len(parts) > 1 or any(variables for variables in form)):
            return None
        total = functools.reduce(g.add, parts)
        if form:
            total = g.add(total, self.sums.node(form, axes, node.dtype))
        if total.dtype != node.dtype:
            total = g.cast(total, node.dtype)
        if total.hint is None and total.op not in ("const", "constexpr", "param"):
            total.hint = node.hint
        return total if total.shape == node.shape or not node.shape else g.broadcast(total, node.shape)

    def _moves(self, var: Var) -> bool:
        if var in self.gone:
            return True
        if var.kind == "lane":
            return var.key[0] in self.axes
        return var.region is None and var.node is not None and bool(var.node.args) and self.touches(var.node)

    def _choice(self, node: Node, axes: Axes) -> Node:
        """A value that a flag chooses, each side of it in its own branch."""
        old, here = node.attrs["if"], self.here
        if old not in self.branches:
            self.branches[old] = self.g.fork(old.cond, True, old.line)
        new, sides = self.branches[old], []
        try:
            for name, self.here in (("then", new.then), ("other", new.other)):
                value = node.attrs[name]
                sides.append(value and self.node(value, axes[len(axes) - len(value.shape) :]))
        finally:
            self.here = here
        then, other = sides
        return self.g.merged(new, then, other, node, here)

    def _again(self, node: Node, axes: Axes) -> Node:
        g = self.g
        args = [self.node(arg, inner) for arg, inner in zip(node.args, _arguments(node, axes), strict=True)]
        new = g.again(node, args)
        if new.hint is None and new.op not in ("const", "constexpr", "param"):
            new.hint = node.hint
        return new


def _arguments(node: Node, axes: Axes) -> list[Axes]:
    """Which axes of the written block the axes of each argument are; None for those that are summed over."""
    if node.op in ELEMENTWISE:
        return [axes[len(axes) - len(arg.shape) :] for arg in node.args]
    if node.op == "expand":
        at = node.attrs["axis"]
        return [(*axes[:at], *axes[at + 1 :])]
    if node.op == "reduce":
        at = node.attrs["axis"]
        return [(*axes[:at], None, *axes[at:])]
    if node.op == "dot" and len(axes) == 2:
        return [(axes[0], None), (None, axes[1])]
    if node.op == "permute":
        order = node.attrs["order"]
        return [tuple(axes[order.index(i)] for i in range(len(order)))]
    raise NotTurned("inner", f"its value comes out of `{node.hint or node.op}`")

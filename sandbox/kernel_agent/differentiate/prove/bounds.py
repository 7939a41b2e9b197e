"""Where the loop over the programs of a forward may start and end, for the tile of one owner.

A program of the forward adds to the tile at `value` only if low(n) <= value < high(n), with n the loop
variable: causal attention's blocks of queries begin with the first that sees a block of keys. The bounds come
from the owner's id alone, never from a carried value.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.nodes import Node, sides
from .affine import Affine, nonzero
from .disjoint import monomial_node


def first(g: Graph, high: Node, n: Node, value: Node) -> tuple[Node | None, bool]:
    """The lowest n for which value < high(n) can hold (None: any), and whether it then does hold.

    That it holds is promised for values below the largest high(n) only.
    """
    if high.op == "cast":
        return first(g, high.args[0], n, value)
    if high.op == "minimum":
        found = [first(g, arg, n, value) for arg in high.args]
        return _most(g, "maximum", [bound for bound, _ in found]), all(exact for _, exact in found)
    if high.op == "ifout" and high.attrs["if"].static and len(sides(high)) == 2:
        (a, left), (b, right) = (first(g, side, n, value) for side in sides(high))
        either = (high.args[0], a or g.const(0), b or g.const(0))
        return g.make("select", either, {}, "int32", ()) if a or b else None, left and right
    linear = _linear(g, high, n)
    slope, rest = linear or (None, None)
    if slope is None or rest is None:
        return None, linear is not None
    if slope is rest:
        return g.make("floordiv", (value, slope)), True
    past = g.make("maximum", (g.add(g.sub(value, rest), g.one), g.const(0)))
    return g.make("cdiv", (past, slope)), True


def last(g: Graph, low: Node, n: Node, value: Node) -> Node | None:
    """One more than the highest n for which low(n) <= value can hold; None where there is no such bound."""
    if low.op == "cast":
        return last(g, low.args[0], n, value)
    if low.op == "maximum":
        return _most(g, "minimum", [last(g, arg, n, value) for arg in low.args])
    if low.op == "mul":  # rounded down to a multiple: at most that much lower
        for part, unit in (low.args, low.args[::-1]):
            if part.op == "floordiv" and part.args[1] is unit and Affine(g).uniform(unit):
                return last(g, part.args[0], n, g.sub(g.add(value, unit), g.one))
    found = _linear(g, low, n)
    slope, rest = found or (None, None)
    if slope is None or rest is None:
        return None
    return g.add(g.make("floordiv", (g.sub(value, rest), slope)), g.one)


def _most(g: Graph, op: str, sides: list[Node | None]) -> Node | None:
    bounds = [side for side in sides if side is not None]
    return g.make(op, bounds) if len(bounds) == 2 else bounds[0] if bounds else None


def _linear(g: Graph, node: Node, n: Node) -> tuple[Node | None, Node] | None:
    """(slope, rest) of slope * n + rest with a uniform rest; slope None where n does not occur. Slopes are
    taken to be positive."""
    affine = Affine(g)
    slope, rest = None, None
    for variables, coefficients in nonzero(affine.terms(node, ())).items():
        alone = len(variables) == 1 and variables[0] is not None and variables[0].node is n
        if variables and not (alone and len(coefficients) == 1):
            return None
        for ids, factor in coefficients.items():
            if variables and factor < 0:
                return None
            term = monomial_node(affine, g, (factor, ids))
            if variables:
                slope = term
            else:
                rest = term if rest is None else g.add(rest, term)
    return slope, g.const(0) if rest is None else rest

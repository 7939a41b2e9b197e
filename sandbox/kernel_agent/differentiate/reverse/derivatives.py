"""Derivatives of functions of numbers: `read/functions.py` says which there are, and what they are called.

A rule gets the graph, the argument x (two: x and z), the result y = f(x) and its adjoint d, and gives the
adjoint of the argument (of both).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ir.graph import Graph
from ..ir.kinds import words
from ..ir.nodes import Node

LN2 = 0.6931471805599453
LN10 = 2.302585092994046
LOG2E = 1.4426950408889634
LOG10E = 0.4342944819032518
TWO_OVER_SQRT_PI = 1.1283791670955126
HALF_SQRT_PI = 0.886226925452758
SQRT_TWO_PI = 2.5066282746310002

# Functions that are no number somewhere, or whose derivative is none.
UNDEFINED = words(
    """exp exp2 exp10 expm1 log log2 log10 log1p sqrt rsqrt cbrt rcbrt pow tan sinh cosh atanh asin acos acosh
    erfinv erfcinv erfcx normcdfinv atan2 fmod remainder"""
)


def _abs(g: Graph, x: Node, y: Node, d: Node) -> Node:
    up = g.compare(">", x, g.number(0))
    down = g.compare("<", x, g.number(0))
    return g.where(up, d, g.where(down, g.neg(d), g.number(0)))


def _exp_of(g: Graph, x: Node, factor: float) -> Node:
    """exp(factor * x * x)"""
    square = g.mul(x, x)
    return g.call("exp", g.neg(square) if factor == -1 else g.mul(g.number(factor), square))


def _times(g: Graph, d: Node, factor: float, x: Node) -> Node:
    return g.mul(g.mul(d, g.number(factor)), x)


def _bessel_i1(g: Graph, x: Node, y: Node, d: Node) -> Node:
    """I1' = I0 - I1 / x, and a half where x is 0."""
    zero = g.compare("==", x, g.number(0))
    slope = g.where(zero, g.number(0.5), g.sub(g.call("cyl_bessel_i0", x), g.div(y, x)))
    return g.mul(d, slope)


def _power(g: Graph, x: Node, z: Node, n: Node, d: Node) -> tuple[Node, Node]:
    lower = g.make("call", (x, g.sub(z, g.number(1))), n.attrs, n.dtype)
    return g.mul(g.mul(d, z), lower), g.mul(g.mul(d, n), g.call("log", x))


def _atan2(g: Graph, x: Node, z: Node, n: Node, d: Node) -> tuple[Node, Node]:
    square = g.add(g.mul(x, x), g.mul(z, z))
    return g.div(g.mul(d, z), square), g.neg(g.div(g.mul(d, x), square))


def rest(g: Graph, x: Node, z: Node, n: Node, d: Node) -> tuple[Node, Node]:
    """n = x - k z for a whole k, which is constant between its jumps."""
    return d, g.neg(g.mul(d, g.div(g.sub(x, n), z)))


UNARY: dict[str, Callable[[Graph, Node, Node, Node], Node]] = {
    "exp": lambda g, x, y, d: g.mul(d, y),
    "exp2": lambda g, x, y, d: g.mul(g.mul(d, y), g.number(LN2)),
    "exp10": lambda g, x, y, d: g.mul(g.mul(d, y), g.number(LN10)),
    "expm1": lambda g, x, y, d: g.mul(d, g.add(y, g.number(1))),
    "log": lambda g, x, y, d: g.div(d, x),
    "log2": lambda g, x, y, d: g.div(g.mul(d, g.number(LOG2E)), x),
    "log10": lambda g, x, y, d: g.div(g.mul(d, g.number(LOG10E)), x),
    "log1p": lambda g, x, y, d: g.div(d, g.add(x, g.number(1))),
    "sqrt": lambda g, x, y, d: g.div(g.mul(d, g.number(0.5)), y),
    "rsqrt": lambda g, x, y, d: g.mul(g.mul(g.mul(g.mul(d, g.number(-0.5)), y), y), y),
    "cbrt": lambda g, x, y, d: g.div(d, g.mul(g.mul(g.number(3), y), y)),
    "rcbrt": lambda g, x, y, d: g.div(_times(g, d, -1 / 3, y), x),
    "sin": lambda g, x, y, d: g.mul(d, g.call("cos", x)),
    "cos": lambda g, x, y, d: g.neg(g.mul(d, g.call("sin", x))),
    "tan": lambda g, x, y, d: g.mul(d, g.add(g.mul(y, y), g.number(1))),
    "sinpi": lambda g, x, y, d: _times(g, d, math.pi, g.call("cospi", x)),
    "cospi": lambda g, x, y, d: _times(g, d, -math.pi, g.call("sinpi", x)),
    "sinh": lambda g, x, y, d: g.mul(d, g.call("cosh", x)),
    "cosh": lambda g, x, y, d: g.mul(d, g.call("sinh", x)),
    "tanh": lambda g, x, y, d: g.mul(d, g.sub(g.number(1), g.mul(y, y))),
    "sigmoid": lambda g, x, y, d: g.mul(g.mul(d, y), g.sub(g.number(1), y)),
    "erf": lambda g, x, y, d: g.mul(g.mul(d, g.number(TWO_OVER_SQRT_PI)), _exp_of(g, x, -1)),
    "erfc": lambda g, x, y, d: g.mul(g.mul(d, g.number(-TWO_OVER_SQRT_PI)), _exp_of(g, x, -1)),
    "erfcx": lambda g, x, y, d: g.mul(d, g.sub(g.mul(g.mul(g.number(2), x), y), g.number(TWO_OVER_SQRT_PI))),
    "erfinv": lambda g, x, y, d: _times(g, d, HALF_SQRT_PI, _exp_of(g, y, 1)),
    "erfcinv": lambda g, x, y, d: _times(g, d, -HALF_SQRT_PI, _exp_of(g, y, 1)),
    "normcdf": lambda g, x, y, d: _times(g, d, 1 / SQRT_TWO_PI, _exp_of(g, x, -0.5)),
    "normcdfinv": lambda g, x, y, d: _times(g, d, SQRT_TWO_PI, _exp_of(g, y, 0.5)),
    "asinh": lambda g, x, y, d: g.mul(d, g.call("rsqrt", g.add(g.mul(x, x), g.number(1)))),
    "acosh": lambda g, x, y, d: g.mul(d, g.call("rsqrt", g.sub(g.mul(x, x), g.number(1)))),
    "atanh": lambda g, x, y, d: g.div(d, g.sub(g.number(1), g.mul(x, x))),
    "asin": lambda g, x, y, d: g.mul(d, g.call("rsqrt", g.sub(g.number(1), g.mul(x, x)))),
    "acos": lambda g, x, y, d: g.neg(g.mul(d, g.call("rsqrt", g.sub(g.number(1), g.mul(x, x))))),
    "atan": lambda g, x, y, d: g.div(d, g.add(g.mul(x, x), g.number(1))),
    "cyl_bessel_i0": lambda g, x, y, d: g.mul(d, g.call("cyl_bessel_i1", x)),
    "cyl_bessel_i1": _bessel_i1,
    "abs": _abs,
}
BINARY: dict[str, Callable[[Graph, Node, Node, Node, Node], tuple[Node, Node]]] = {
    "pow": _power,
    "atan2": _atan2,
    "fmod": rest,
    "remainder": rest,
}

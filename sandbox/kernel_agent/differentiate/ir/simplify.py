"""Algebra at construction: constants, neutral elements, adjoint pairs that cancel.

Every rule here is exact in real arithmetic and keeps the type of the result. `0 * x` becomes 0 although IEEE
says NaN for an infinite x: an adjoint that is identically zero contributes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .folding import FOLD, fold
from .nodes import Node, beneath

if TYPE_CHECKING:
    from .graph import Graph


def is_zero(node: Node) -> bool:
    if node.op == "const":
        return node.value == 0 and not isinstance(node.value, (bool, str))
    return node.op in ("full", "broadcast", "expand", "cast") and is_zero(node.args[0])


def is_number(node: Node, number: float) -> bool:
    if node.op == "const":
        return not isinstance(node.value, (bool, str)) and node.value == number
    return node.op in ("full", "broadcast", "expand") and is_number(node.args[0], number)


def is_minus_inf(node: Node) -> bool:
    return is_number(node, float("-inf"))


def node(g: Graph, op: str, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    """A simpler equal of `op(args)`, or None."""
    if op in FOLD and args and all(a.op == "const" for a in args) and not shape:
        value = fold(op, [a.value for a in args], attrs)
        if value is not None:
            return g.const(value)
    rule = _RULES.get(op)
    return rule(g, args, attrs, dtype, shape) if rule else None


def _as(g: Graph, value: Node, dtype: str, shape: tuple) -> Node | None:
    """`value` as the result, if that needs no more than a broadcast."""
    if value.dtype != dtype and not (value.weak and not value.shape):
        return None
    if value.shape == shape:
        return value
    return g.broadcast(value, shape) if shape else None


def _add(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    a, b = args
    for one, other in ((a, b), (b, a)):
        if is_zero(one):
            return _as(g, other, dtype, shape)
    for one, other in ((a, b), (b, a)):
        if other.op == "neg" and one.op != "neg":
            return g.make("sub", (one, other.args[0]), {}, dtype, shape)
        if other.op == "sub" and other.args[1] is one and not any(n.is_float for n in (one, other)):
            return _as(g, other.args[0], dtype, shape)
        if other.op == "mod" and (whole := _digits_of(one)) == other.args:
            return _as(g, g.cast(whole[0], dtype), dtype, shape)
    return _over_one_divisor(g, "add", a, b, dtype, shape)


def _digits_of(node: Node) -> tuple[Node, ...]:
    """(n, d) of n // d * d."""
    for quotient, divisor in (node.args, node.args[::-1]) if node.op == "mul" else ():
        inner = beneath(quotient, "cast")
        if inner.op == "floordiv" and inner.args[1] is divisor and not quotient.is_float:
            return inner.args
    return ()


def _over_one_divisor(g: Graph, op: str, a: Node, b: Node, dtype: str, shape: tuple) -> Node | None:
    """a / s + b / s = (a + b) / s, for adjoints, whose parts have no other use."""
    if not (g.reverse and a.op == b.op == "div" and a.args[1] is b.args[1] and a.is_float):
        return None
    if a.shape != shape and b.shape != shape:
        return None
    top = g.make(op, (a.args[0], b.args[0]))
    return g.make("div", (top, a.args[1]), {}, dtype, shape) if top.dtype == dtype else None


def _sub(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    a, b = args
    if is_zero(b):
        return _as(g, a, dtype, shape)
    if a is b:
        return g.zeros(shape, dtype)
    if is_zero(a) and b.dtype == dtype:
        return _as(g, g.neg(b), dtype, shape)
    if b.op == "neg":
        return g.make("add", (a, b.args[0]), {}, dtype, shape)
    return _over_one_divisor(g, "sub", a, b, dtype, shape)


def _mul(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    a, b = args
    if is_zero(a) or is_zero(b):
        return g.zeros(shape, dtype)
    for number in (1, -1):
        for one, other in ((a, b), (b, a)):
            if is_number(one, number) and (number > 0 or other.dtype == dtype):
                return _as(g, other if number > 0 else g.neg(other), dtype, shape)
    return _signed(g, "mul", a, b, dtype, shape)


def _signed(g: Graph, op: str, a: Node, b: Node, dtype: str, shape: tuple) -> Node | None:
    """A sign is taken out of a product, where a sum can become a difference."""
    if a.op == "neg" and g.reverse:
        return g.neg(g.make(op, (a.args[0], b), {}, dtype, shape))
    if b.op == "neg" and g.reverse:
        return g.neg(g.make(op, (a, b.args[0]), {}, dtype, shape))
    return None


def _div(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    a, b = args
    if is_number(b, 1):
        return _as(g, a, dtype, shape)
    if is_zero(a):
        return g.zeros(shape, dtype)
    if g.reverse and b.op == "div" and is_number(b.args[0], 1) and b.shape == b.args[1].shape == ():
        return g.mul(a, b.args[1])  # of one that was saved inverted
    return _signed(g, "div", a, b, dtype, shape)


def _whole(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    return _as(g, args[0], dtype, shape) if is_number(args[1], 1) else None


def _neg(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,) = args
    if is_zero(a):
        return a
    if a.op == "neg":
        return a.args[0]
    if a.op == "sub":
        return g.make("sub", (a.args[1], a.args[0]), {}, dtype, shape)
    return None


def _logic(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    for one, other in (args, args[::-1]):
        if one.op == "const" and one.value is True:
            return _as(g, other, "int1", shape)
    return args[0] if args[0] is args[1] else None


def _where(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    cond, a, b = args
    if cond.op == "const":
        return _as(g, a if cond.value else b, dtype, shape)
    if a is b or (is_zero(a) and is_zero(b)):
        return _as(g, a, dtype, shape)
    if a.op == "where" and a.args[0] is cond:
        return g.make("where", (cond, a.args[1], b), {}, dtype, shape)
    return None


def _cast(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,) = args
    if a.dtype == dtype and not a.weak:
        return a
    if a.op == "cast" and a.args[0].dtype == dtype and a.args[0].is_float and a.reverse:
        return a.args[0]
    return None


def _expand(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,) = args
    if a.op == "full" or (not a.shape and a.op == "const"):
        return g.make("full", a.args or (a,), {}, dtype, shape)
    return g.neg(g.expand(a.args[0], attrs["axis"])) if a.op == "neg" and g.reverse else None


def _broadcast(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,) = args
    if a.shape == shape:
        return a
    if a.op in ("full", "broadcast"):
        return g.make(a.op, a.args, a.attrs, dtype, shape)
    if a.op == "const":
        return g.make("full", (a,), {}, dtype, shape)
    return g.neg(g.broadcast(a.args[0], shape)) if a.op == "neg" and g.reverse else None


def _reduce(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,), axis = args, attrs["axis"]
    if a.op == "expand" and a.attrs["axis"] == axis:
        return a.args[0] if a.args[0].dtype == dtype else None
    if attrs["fn"] != "sum":
        return None
    if is_zero(a):
        return g.zeros(shape, dtype)
    if a.op == "neg" and g.reverse:
        return g.neg(g.make("reduce", a.args, attrs, dtype, shape))
    if a.op == "div" and g.reverse and not a.args[1].shape and a.args[0].dtype == dtype:
        return g.make("div", (g.make("reduce", a.args[:1], attrs, dtype, shape), a.args[1]), {}, dtype, shape)
    return None


def _permute(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,), order = args, attrs["order"]
    if order == tuple(range(len(order))):
        return a
    if a.op == "permute":
        inner = a.attrs["order"]
        return g.make("permute", a.args, {"order": tuple(inner[i] for i in order)}, dtype, shape)
    if a.op == "dot" and order == (1, 0) and any(_permuted(x) for x in a.args):
        left, right = (g.make("permute", (x,), attrs, x.dtype, x.shape[::-1]) for x in a.args)
        return g.make("dot", (right, left), a.attrs, dtype, shape)
    if a.op == "cast" and _permuted(a):
        return g.cast(g.make("permute", a.args, attrs, a.args[0].dtype, shape), dtype)
    return None


def _permuted(node: Node) -> bool:
    return node.op == "permute" or (node.op == "cast" and _permuted(node.args[0]))


def _reshape(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    (a,) = args
    if a.shape == shape:
        return a
    return g.make("reshape", a.args, {}, dtype, shape) if a.op == "reshape" else None


def _call(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    if attrs["fn"] not in ("exp", "exp2"):
        return None
    if is_zero(args[0]):
        return g.const(1.0, dtype, shape)
    return g.zeros(shape, dtype) if is_minus_inf(args[0]) else None


def _dot(g: Graph, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node | None:
    return g.zeros(shape, dtype) if is_zero(args[0]) or is_zero(args[1]) else None


_RULES = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "floordiv": _whole,
    "cdiv": _whole,
    "neg": _neg,
    **dict.fromkeys(("maximum", "minimum"), lambda g, args, *_: args[0] if args[0] is args[1] else None),
    "and": _logic,
    "where": _where,
    "cast": _cast,
    "expand": _expand,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "permute": _permute,
    "reshape": _reshape,
    "call": _call,
    "dot": _dot,
}

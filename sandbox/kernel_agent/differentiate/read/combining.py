"""Reductions and scans by a combine function, read by what that function computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ir.graph import Graph, promote
from ..ir.nodes import Node, real
from ..ir.refusal import Refusal
from ..ir.values import is_helper

if TYPE_CHECKING:
    from .normalise import Builder


def associative_scan(b: Builder, input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
    """Of one value; of two where they are first-order recurrences (a, x) -> a h + x."""
    items = [b.node(v) for v in (input if isinstance(input, tuple) else (input,))]
    if len(items) > 2:
        message = "only scans of one or two values are supported"
        raise Refusal("associative_scan", message, "Scan the values one by one, if they allow that.")
    at = int(b.number(axis)) % len(items[0].shape)
    attrs = {"axis": at, "reverse": bool(b.number(reverse))}
    if len(items) == 2:
        return _recurrence(b, items, combine_fn, attrs)
    out = _scan(b, "associative_scan", items[0], combine_fn, attrs)
    return (out,) if isinstance(input, tuple) else out


def reduce(b: Builder, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
    """Of one value."""
    items = [b.node(v) for v in (input if isinstance(input, tuple) else (input,))]
    if len(items) > 1:
        message = "only reductions of one value by a function of one's own are supported"
        raise Refusal(
            "tl.reduce", message, "For the place of the largest: tl.max(x, axis, return_indices=True)."
        )
    out, keep = items[0], bool(b.number(keep_dims))
    rank = len(out.shape)
    axes = list(range(rank))[::-1] if axis is None else [int(b.number(axis)) % rank]
    for one in axes:
        out = _reduced(b, out, one, combine_fn, keep)
    return (out,) if isinstance(input, tuple) else out


def _reduced(b: Builder, x: Node, axis: int, function: Any, keep: bool) -> Node:
    """The last of a scan, where the function is none that reductions know."""
    g: Graph = b.g
    left, right, made = _computed(b, "tl.reduce", x, function)
    fn = _known(g, left, right, made)
    if fn in ("sum", "max", "min"):
        return g.reduce(fn, x, axis, keep)
    scan = _scan(b, "tl.reduce", x, function, {"axis": axis, "reverse": False})
    last = g.sub(x.shape[axis], g.const(1))
    lane = g.lane(x.shape[axis], axis, len(x.shape))
    chosen = g.where(g.compare("==", lane, last), scan, g.number(0))
    return g.reduce("sum", chosen, axis, keep)


def _scan(b: Builder, what: str, x: Node, function: Any, attrs: dict) -> Node:
    g: Graph = b.g
    left, right, made = _computed(b, what, x, function)
    fn = _known(g, left, right, made)
    if fn in ("sum", "prod"):
        return g.make("scan", (x,), {"fn": fn, **attrs}, x.dtype, x.shape)
    if not (is_helper(function) and b.is_ours(function)):
        message = f"`{function.__name__}` is a function of another file"
        raise Refusal(what, message, "Write it in the kernel's own file.")
    attrs = {"text": function.__name__, "made": made.id, **attrs}
    return g.make("combine", (x,), attrs, x.dtype, x.shape)


def _computed(b: Builder, what: str, x: Node, function: Any) -> tuple[Node, Node, Node]:
    """The operands of a combine function, as blocks like x, and what it makes of them."""
    known = b.g.combined.get((function, x.dtype, x.shape))
    if known is not None:
        return known
    left, right = (b.g.fresh("phi", {"name": side}, x.dtype, x.shape, b.g.top) for side in ("left", "right"))
    made = _inlined(b, what, function, [left, right])
    if isinstance(made, tuple) and len(made) == 1:
        made = made[0]
    if not isinstance(made, Node) or (real(made.dtype), made.shape) != (real(x.dtype), x.shape):
        message = (
            f"`{function.__name__}` does not return one value of the type of its operands, {real(x.dtype)}"
        )
        raise Refusal(what, message, "Cast what is combined beforehand, or in the function at its end.")
    b.g.combined[function, x.dtype, x.shape] = b.g.combined[made.id] = left, right, made
    return left, right, made


def _inlined(b: Builder, what: str, function: Any, operands: list[Node]) -> Any:
    if is_helper(function) and b.is_ours(function) and function.__name__ in b.functions:
        return b.inline(b.functions[function.__name__], operands, {})
    imported = b.source_of(function, b.g.line or 0)
    if imported is not None:
        return b.inline_imported(function, imported, operands, {})
    raise Refusal(
        what, "the source of its combine function cannot be read", "Write it in the kernel's own file."
    )


def _known(g: Graph, left: Node, right: Node, made: Node) -> str | None:
    pairs = ((left, right), (right, left))
    if made in [g.add(*pair) for pair in pairs]:
        return "sum"
    if made in [g.mul(*pair) for pair in pairs]:
        return "prod"
    for fn, op, greater in (("max", "maximum", (">", ">=")), ("min", "minimum", ("<", "<="))):
        chosen = [g.where(g.compare(sign, a, c), a, c) for a, c in pairs for sign in greater]
        if made in [*(g.make(op, pair) for pair in pairs), *chosen]:
            return fn
    return None


def _recurrence(b: Builder, items: list[Node], function: Any, attrs: dict) -> Any:
    g: Graph = b.g
    left, right = (
        [g.fresh("phi", {"name": s}, n.dtype, (), g.top) for n in items] for s in ("left", "right")
    )
    found = _inlined(b, "associative_scan", function, [*left, *right])
    products = (g.mul(left[0], right[0]), g.mul(right[0], left[0]))
    scaled = (g.mul(left[1], right[0]), g.mul(right[0], left[1]))
    sums = [pair for s in scaled for pair in (g.add(s, right[1]), g.add(right[1], s))]
    if isinstance(found, tuple) and len(found) == 2 and found[0] in products and found[1] in sums:
        a, x = items
        h = g.make("affine", (a, x), {"text": function.__name__, **attrs}, promote((a, x)), x.shape)
        return (g.make("scan", (a,), {"fn": "prod", **attrs}, a.dtype, a.shape), h)
    raise Refusal(
        "associative_scan",
        f"`{function.__name__}` is no first-order recurrence",
        "Write it as (a1 * a2, a2 * b1 + b2).",
    )

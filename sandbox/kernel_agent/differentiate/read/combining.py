"""Reductions and scans by a combine function, read by what that function computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ir.graph import Graph, promote
from ..ir.names import LINEAR_STEP
from ..ir.nodes import Node, nodes_in, real
from ..ir.refusal import Refusal
from ..ir.simplify import is_zero
from ..ir.values import Poison, is_helper
from .moments import Roles, is_whole, merge_of_means

if TYPE_CHECKING:
    from .normalise import Builder

Combined = tuple[list[Node], list[Node], list[Node]]  # left and right operands, and what is made of them


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
    """Of one value or several."""
    items = [b.node(v) for v in (input if isinstance(input, tuple) else (input,))]
    keep, rank = bool(b.number(keep_dims)), len(items[0].shape)
    axes = list(range(rank))[::-1] if axis is None else [int(b.number(axis)) % rank]
    for one in axes:
        items = _reduced(b, items, one, combine_fn, keep)
    return tuple(items) if isinstance(input, tuple) else items[0]


def _reduced(b: Builder, items: list[Node], axis: int, function: Any, keep: bool) -> list[Node]:
    """Along an axis: what reductions know, or the last of a scan, or the fold of several values."""
    g: Graph = b.g
    items = [g.broadcast(x, items[0].shape) for x in items]
    computed = _computed(b, "tl.reduce", items, function)
    found = [_known(g, *one) for one in zip(*computed, strict=True)]
    if all(fn in ("sum", "max", "min") for fn in found):
        return [g.reduce(str(fn), x, axis, keep) for fn, x in zip(found, items, strict=True)]
    forwards = {"axis": axis, "reverse": False}
    if len(items) == 1:
        return [_last(g, _scan(b, "tl.reduce", items[0], function, forwards), axis, keep)]
    merge = merge_of_means(*computed)
    if merge is not None and (merge.of_any or is_whole(items[merge.roles[2]])):
        return _moments(g, items, merge.roles, axis, keep)
    if _is_recurrence(g, *computed):
        return [_last(g, one, axis, keep) for one in _first_order(g, items, function, forwards)]
    _require_ours(b, "tl.reduce", function)
    made = []
    for index, x in enumerate(items):
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        attrs = {"text": function.__name__, "made": _key(computed), "axis": axis, "index": index}
        node = g.make("fold", tuple(items), attrs, x.dtype, shape)
        made.append(g.expand(node, axis) if keep else node)
    return made


def _moments(g: Graph, items: list[Node], roles: Roles, axis: int, keep: bool) -> list[Node]:
    """Of parts with a mean, a sum of squared distances from it and a count, those of the whole: by sums, the
    distances being from the mean of the whole."""
    mean, square, count = (items[at] for at in roles)
    total = g.reduce("sum", count, axis)
    some = g.compare("!=", total, g.number(0))
    whole = g.where(some, g.div(g.reduce("sum", g.mul(count, mean), axis), total), g.number(0))
    gap = g.sub(mean, g.expand(whole, axis))
    squares = g.reduce("sum", g.add(square, g.mul(g.mul(gap, gap), count)), axis)
    made = dict(zip(roles, (whole, squares, total), strict=True))
    return [g.expand(made[at], axis) if keep else made[at] for at in range(len(items))]


def _last(g: Graph, x: Node, axis: int, keep: bool) -> Node:
    last = g.sub(x.shape[axis], g.const(1))
    lane = g.lane(x.shape[axis], axis, len(x.shape))
    return g.reduce("sum", g.where(g.compare("==", lane, last), x, g.number(0)), axis, keep)


def _scan(b: Builder, what: str, x: Node, function: Any, attrs: dict) -> Node:
    g: Graph = b.g
    computed = _computed(b, what, [x], function)
    fn = _known(g, *(of[0] for of in computed))
    if fn in ("sum", "prod"):
        return g.make("scan", (x,), {"fn": fn, **attrs}, x.dtype, x.shape)
    _require_ours(b, what, function)
    attrs = {"text": function.__name__, "made": _key(computed), **attrs}
    return g.make("combine", (x,), attrs, x.dtype, x.shape)


def _require_ours(b: Builder, what: str, function: Any) -> None:
    if not (is_helper(function) and b.is_ours(function)):
        message = f"`{function.__name__}` is a function of another file"
        raise Refusal(what, message, "Write it in the kernel's own file.")


def _computed(b: Builder, what: str, items: list[Node], function: Any) -> Combined:
    """The operands of a combine function, as blocks like the items, and what it makes of them."""
    kinds = tuple((x.dtype, x.shape) for x in items)
    known = b.g.combined.get((function, kinds))
    if known is not None:
        return known
    left, right = (
        [b.g.fresh("phi", {"name": side}, x.dtype, x.shape, b.g.top) for x in items]
        for side in ("left", "right")
    )
    made = _inlined(b, what, function, [*left, *right])
    made = list(made) if isinstance(made, tuple) else [made]
    like = [isinstance(one, Node) and (real(one.dtype), one.shape) for one in made]
    if like != [(real(x.dtype), x.shape) for x in items]:
        kind = " and ".join(dict.fromkeys(str(real(x.dtype)) for x in items))
        count = "one value" if len(items) == 1 else f"{len(items)} values"
        message = f"`{function.__name__}` does not return {count} of the type of its operands, {kind}"
        raise Refusal(what, message, "Cast what is combined beforehand, or in the function at its end.")
    computed = left, right, made
    b.g.combined[function, kinds] = b.g.combined[_key(computed)] = computed
    return computed


def _key(computed: Combined) -> tuple[int, ...]:
    return tuple(node.id for node in computed[2])


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
    if isinstance(found, tuple) and _is_recurrence(g, left, right, list(found)):
        return _first_order(g, items, function, attrs)
    if (made := _segmented(b, items, function, attrs)) is not None:
        return made
    raise Refusal(
        "associative_scan",
        f"`{function.__name__}` is no first-order recurrence",
        "Write it as (a1 * a2, a2 * b1 + b2).",
    )


def _segmented(b: Builder, items: list[Node], function: Any, attrs: dict) -> Any:
    """A running sum that a flag beside each value starts anew, or scales: h -> a h + x, with what the flag
    makes of the h before it for a. What the flags become is not known."""
    g: Graph = b.g
    items = [g.broadcast(x, max((n.shape for n in items), key=len)) for x in items]
    left = [g.fresh("phi", {"name": "left"}, x.dtype, x.shape, g.top) for x in items]
    found = _inlined(b, "associative_scan", function, [*left, *items])
    for at, x in enumerate(items):
        flags = Poison(f"what `{function.__name__}` makes of the flags is used", "flags of a scan")
        a = _scale(g, found[at], left[at], x) if isinstance(found, tuple) and len(found) == 2 else None
        if a is None or not x.is_float or any(n in left for n in nodes_in([a])):
            continue
        h = g.make("affine", (g.cast(a, x.dtype), x), {"text": LINEAR_STEP, **attrs}, x.dtype, x.shape)
        return (flags, h) if at else (h, flags)
    return None


def _scale(g: Graph, made: Any, before: Node, x: Node) -> Node | None:
    """a where a combine function makes a * before + x; None where it does not."""
    sums = [g.add(before, x), g.add(x, before)]
    match made:
        case Node(op="where", args=(asked, one, other)) if one is x and other in sums:
            return g.where(asked, g.number(0), g.number(1))
        case Node(op="where", args=(asked, one, other)) if other is x and one in sums:
            return g.where(asked, g.number(1), g.number(0))
        case Node(op="add", args=(one, other)) if x in (one, other):
            return _factor(g, one if other is x else other, before)
    return None


def _factor(g: Graph, term: Node, before: Node) -> Node | None:
    match term:
        case Node(op="mul", args=(one, other)) if before in (one, other):
            return one if other is before else other
        case Node(op="where", args=(asked, one, other)) if one is before and is_zero(other):
            return g.where(asked, g.number(1), g.number(0))
        case Node(op="where", args=(asked, one, other)) if other is before and is_zero(one):
            return g.where(asked, g.number(0), g.number(1))
    return None


def _is_recurrence(g: Graph, left: list[Node], right: list[Node], found: list[Node]) -> bool:
    """Whether a function combines two steps h -> a h + x to one."""
    if len(left) != 2 or len(found) != 2:
        return False
    products = (g.mul(left[0], right[0]), g.mul(right[0], left[0]))
    scaled = (g.mul(left[1], right[0]), g.mul(right[0], left[1]))
    sums = [pair for s in scaled for pair in (g.add(s, right[1]), g.add(right[1], s))]
    return found[0] in products and found[1] in sums


def _first_order(g: Graph, items: list[Node], function: Any, attrs: dict) -> tuple[Node, Node]:
    a, x = items
    h = g.make("affine", (a, x), {"text": function.__name__, **attrs}, promote((a, x)), x.shape)
    return g.make("scan", (a,), {"fn": "prod", **attrs}, a.dtype, a.shape), h

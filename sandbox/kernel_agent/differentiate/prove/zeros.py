"""Which values are zero in the lanes that a mask leaves out: what is stored under the mask is all of them."""

from __future__ import annotations

from ..ir.kinds import LANEWISE, STRETCHING
from ..ir.nodes import Carry, For, Node, Store, beneath, nodes_in, reachable, sides, walk
from ..ir.simplify import is_minus_inf, is_zero
from ..ir.values import signature
from .masks import Bound, comparisons, conjuncts, upper_bounds, without_expansions


def left_out(carry: Carry, store: Store) -> bool:
    """Whether a carry is zero, before every step, in the lanes that a store of it leaves out."""
    if store.mask is None:
        return True
    bounds = _all_bounds(store)
    if bounds is None or carry.next is None:
        return False
    return all(beyond(node, bound, carry.phi) for bound in bounds for node in (carry.init, carry.next))


def not_stored(value: Node, store: Store) -> bool:
    """Whether a value is zero in the lanes that a store of it leaves out."""
    bounds = [] if store.mask is None else _all_bounds(store)
    return bounds is not None and all(beyond(value, bound, None) for bound in bounds)


def _all_bounds(store: Store) -> list[Bound] | None:
    """The bounds of a store's lanes; None where its mask asks for something else too."""
    assert store.mask is not None
    rank = len(store.offset.shape)
    bounds = list(upper_bounds(store.mask, rank))
    asked = [c for c in conjuncts(store.mask, rank) if not _natural(c[0])]
    return bounds if len(bounds) == len(asked) else None


def unread(effects: list, loop: For, k: int, store: Store) -> bool:
    """Whether nothing that a kernel stores hangs on a carry's lanes that a store of it leaves out: each lane
    of the carry is used for the same lane, and stored under the same bounds."""
    carry, rank = loop.carries[k], len(store.offset.shape)
    if store.mask is None or left_out(carry, store):
        return True
    bounds = _all_bounds(store)
    wanted = set(map(_made, bounds or ()))
    if bounds is None or len(wanted) != len(bounds):
        return False
    tainted = _hanging_on(effects, carry.phi)
    lanewise = LANEWISE - STRETCHING | {"compare", "and", "or", "not", "phi", "loopout", "ifout"}
    if any(node.op not in lanewise or len(node.shape) != rank for node in tainted):
        return False
    for other in (e for e in walk(effects) if isinstance(e, Store)):
        if other.offset in tainted or other.mask in tainted:
            return False
        asked = () if other.mask is None else upper_bounds(other.mask, rank)
        if other.value in tainted and not wanted <= set(map(_made, asked)):
            return False
    return True


def _hanging_on(effects: list, phi: Node) -> set[Node]:
    """All values that hang on a carry, through loops and branches."""
    items = list(reachable(effects))
    carries = {c.phi: c for item in items if isinstance(item, For) for c in item.carries}
    tainted, count = {phi}, 0
    while count != len(tainted):
        count = len(tainted)
        for node in (item for item in items if isinstance(item, Node)):
            parts: list[Node | None] = list(node.args)
            if node.op == "ifout":
                parts += sides(node)
            elif node.op == "loopout":
                parts.append(node.attrs["loop"].carries[node.attrs["index"]].phi)
            elif node in carries:
                parts += [carries[node].init, carries[node].next]
            if any(part in tainted for part in parts):
                tainted.add(node)
    return tainted


def _natural(node: Node) -> bool:
    """Whether a condition asks no more than that an index is not negative."""
    return node.op == "compare" and node.attrs["cmp"] == ">=" and is_zero(node.args[1])


def _bounds(mask: Node, bound: Bound, rank: int) -> bool:
    """Whether a mask leaves the same lanes out, wherever its conditions were made."""
    return _made(bound) in map(_made, upper_bounds(mask, rank))


def _made(bound: Bound) -> tuple:
    index, limit, axis = bound
    if any(n.op in ("phi", "loopout", "ifout", "random") for n in nodes_in([index, limit])):
        return index.id, limit.id, axis  # two of these may be called alike
    return signature(index), signature(limit), axis


def beyond(node: Node, bound: Bound, known: Node | None) -> bool:
    """Whether a value is zero in all lanes whose index is not below its bound, if `known` is."""
    index, limit, axis = bound
    if node is known or is_zero(node):
        return True
    if node.op == "load" and len(node.args) == 4:
        return _bounds(node.args[2], bound, len(node.shape)) and is_zero(node.args[3])
    if node.op == "where":
        cond, one, other = node.args
        if any(len(side.shape) != len(node.shape) and not is_zero(side) for side in (one, other)):
            return False
        never = _bounds(cond, bound, len(node.shape)) or _within(cond, bound, len(node.shape))
        inside = never or beyond(one, bound, known)
        return inside and beyond(other, bound, known)
    if node.op in ("cast", "neg"):
        return beyond(node.args[0], bound, known)
    if node.op == "call" and node.attrs["fn"] in ("exp", "exp2"):
        return _lowest(node.args[0], bound)
    if node.op == "ifout":
        return all(beyond(side, bound, known) for side in sides(node))
    if node.op == "expand":
        at = node.attrs["axis"]
        return at != axis and beyond(node.args[0], (index, limit, axis - (at < axis)), known)
    if node.op == "permute":
        return beyond(node.args[0], (index, limit, node.attrs["order"][axis]), known)
    if node.op == "reduce" and node.attrs["fn"] == "sum":
        return beyond(node.args[0], (index, limit, axis + (node.attrs["axis"] <= axis)), known)
    if node.op == "dot":
        a, b, *rest = node.args
        side = (a, b)[axis] if len(node.shape) == 2 else None
        return side is not None and beyond(side, bound, known) and all(beyond(c, bound, known) for c in rest)
    if node.op in ("add", "sub", "mul", "div"):
        whole = [len(arg.shape) == len(node.shape) and beyond(arg, bound, known) for arg in node.args]
        return any(whole) if node.op == "mul" else whole[0] if node.op == "div" else all(whole)
    return False


def _within(cond: Node, bound: Bound, rank: int) -> bool:
    """Whether a condition holds only where an index is that of a step, which is below the bound."""
    _, limit, axis = bound
    for node, axes in comparisons(cond, rank):
        for lane, step in (node.args, node.args[::-1]):
            core, left = without_expansions(lane, axes)
            alike = len(left) == 1 and left[0] == axis and _made((core, limit, axis)) == _made(bound)
            if node.attrs["cmp"] == "==" and alike and _step_below(beneath(step, "cast"), limit):
                return True
    return False


def _step_below(step: Node, limit: Node) -> bool:
    """Whether the number of a step, counted up or down, is below a limit in every step."""
    last, number = step.args if step.op == "sub" else (None, step)
    if number.op != "iv" or number.home.bounds is None:
        return False
    first, end, stride = number.home.bounds
    if first.op != "const" or stride.op != "const" or first.value < 0 or stride.value < 0:
        return False
    if last is None:
        return end is limit
    return (
        last.op == "sub" and last.args[0] is limit and last.args[1].op == "const" and last.args[1].value > 0
    )


def _lowest(node: Node, bound: Bound) -> bool:
    """Whether a value is minus infinity in all lanes whose index is not below its bound, or no number."""
    if is_minus_inf(node):
        return True
    if node.op in ("full", "broadcast", "cast"):
        return _lowest(node.args[0], bound)
    if node.op == "load" and len(node.args) == 4:
        return _bounds(node.args[2], bound, len(node.shape)) and _lowest(node.args[3], bound)
    if node.op == "where":
        return _bounds(node.args[0], bound, len(node.shape)) and _lowest(node.args[2], bound)
    if node.op in ("add", "sub"):
        return any(
            len(arg.shape) == len(node.shape) and _lowest(arg, bound)
            for arg in node.args[: 2 if node.op == "add" else 1]
        )
    return False

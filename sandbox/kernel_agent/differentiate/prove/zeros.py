"""Which values are zero in the lanes that a mask leaves out: what is stored under the mask is all of them."""

from __future__ import annotations

from ..ir.nodes import Carry, Node, Store, sides
from ..ir.simplify import is_zero
from ..ir.values import signature
from .masks import Bound, conjuncts, upper_bounds


def left_out(carry: Carry, store: Store) -> bool:
    """Whether a carry is zero, before every step, in the lanes that a store of it leaves out."""
    mask = store.mask
    if mask is None:
        return True
    rank = len(store.offset.shape)
    bounds = upper_bounds(mask, rank)
    if len(bounds) != len([c for c in conjuncts(mask, rank) if not _natural(c[0])]) or carry.next is None:
        return False
    return all(beyond(node, bound, carry.phi) for bound in bounds for node in (carry.init, carry.next))


def _natural(node: Node) -> bool:
    """Whether a condition asks no more than that an index is not negative."""
    return node.op == "compare" and node.attrs["cmp"] == ">=" and is_zero(node.args[1])


def _bounds(mask: Node, bound: Bound, rank: int) -> bool:
    """Whether a mask leaves the same lanes out, wherever its conditions were made."""
    return _made(bound) in map(_made, upper_bounds(mask, rank))


def _made(bound: Bound) -> tuple:
    index, limit, axis = bound
    return signature(index), signature(limit), axis


def beyond(node: Node, bound: Bound, known: Node) -> bool:
    """Whether a value is zero in all lanes whose index is not below its bound, if `known` is."""
    index, limit, axis = bound
    if node is known or is_zero(node):
        return True
    if node.op == "load" and len(node.args) == 4:
        return _bounds(node.args[2], bound, len(node.shape)) and is_zero(node.args[3])
    if node.op == "where":
        cond, one, other = node.args
        if len(one.shape) != len(node.shape) or len(other.shape) != len(node.shape):
            return False
        inside = _bounds(cond, bound, len(node.shape)) or beyond(one, bound, known)
        return inside and beyond(other, bound, known)
    if node.op in ("cast", "neg"):
        return beyond(node.args[0], bound, known)
    if node.op == "ifout":
        return all(beyond(side, bound, known) for side in sides(node))
    if node.op == "expand":
        at = node.attrs["axis"]
        return at != axis and beyond(node.args[0], (index, limit, axis - (at < axis)), known)
    if node.op == "dot":
        a, b, *rest = node.args
        side = (a, b)[axis] if len(node.shape) == 2 else None
        return side is not None and beyond(side, bound, known) and all(beyond(c, bound, known) for c in rest)
    if node.op in ("add", "sub", "mul", "div"):
        whole = [len(arg.shape) == len(node.shape) and beyond(arg, bound, known) for arg in node.args]
        return any(whole) if node.op == "mul" else whole[0] if node.op == "div" else all(whole)
    return False

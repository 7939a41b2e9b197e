"""How many elements a gradient write reaches: a buffer that is written as a whole needs no zeros first.

A write that is proven disjoint reaches one element for each program, iteration and lane that its mask lets
through. They are counted here, as a value for the host, which compares it with the size of the tensor. None
where they cannot be counted exactly.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.nodes import Node, Store, walk
from ..ir.simplify import is_zero
from ..ir.values import Kernel
from .affine import Affine, Group, Var, divide, upper
from .disjoint import Proof, bounds_of, disjoint, shared_lanes, smaller
from .masks import parts


def overwritten(kernel: Kernel, name: str, axes: list[int]) -> Node | None:
    """How many elements of a buffer the forward writes, each once, whatever it holds; None where unknown."""
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store) and e.base.attrs["name"] == name]
    if len(stores) != 1 or stores[0].kind != "store" or stores[0].base.op != "param":
        return None
    (store,) = stores
    g = kernel.graph
    affine = Affine(g)
    groups = affine.solved(store.offset)
    if store.region is not g.top or groups is None:
        return None
    proof = disjoint(g, store.offset, store.mask, (), axes)
    if not isinstance(proof, Proof) or proof.layouts or proof.asked:
        return None
    return reached(affine, g, groups, store.offset, store.mask)


def reached(affine: Affine, g: Graph, groups: list[Group], offset: Node, mask: Node | None) -> Node | None:
    """The number of elements; the write must stand under no condition but its mask."""
    limits = _limits(affine, groups, offset, mask)
    if limits is None:
        return None
    if shared_lanes(g, groups, offset):
        return None
    total = g.one
    halves = _halves(groups)
    for group, limit in zip(groups, limits, strict=True):
        size = g.one
        for var, _ in group.terms:
            count = _count(affine, g, var, halves)
            if count is None or (limit is not None and var.kind in ("floordiv", "mod")):
                return None
            size = g.mul(size, count)
        total = g.mul(total, size if limit is None else smaller(g, limit, size))
    return total


def _limits(affine: Affine, groups: list[Group], offset: Node, mask: Node | None) -> list[Node | None] | None:
    """The bound that a mask sets to each index; None where it asks for anything else."""
    limits: list[Node | None] = [None] * len(groups)
    signatures = []
    for group in groups:
        lowest = group.terms[0][1]
        signatures.append(frozenset((var.kind, var.key, divide(m, lowest)) for var, m in group.terms))
    for condition in parts(mask):
        if len(condition.shape) != len(offset.shape):
            return None
        found = list(bounds_of(affine, condition, len(offset.shape)).items())
        if len(found) != 1 or found[0][0] not in signatures:
            return None
        ((signature, bound),) = found
        at = signatures.index(signature)
        if limits[at] is not None and limits[at] is not bound:
            return None
        limits[at] = bound
    return limits


def _halves(groups: list[Group]) -> set[tuple[int, int]]:
    """(id, divisor) pairs of which both quotient and remainder occur: together they count the ids."""
    seen: dict[tuple[int, int], set[str]] = {}
    for group in groups:
        for var, _ in group.terms:
            if var.kind in ("floordiv", "mod") and var.node is not None:
                seen.setdefault((var.node.args[0].id, var.node.args[1].id), set()).add(var.kind)
    return {key for key, kinds in seen.items() if len(kinds) == 2}


def _count(affine: Affine, g: Graph, var: Var, halves: set[tuple[int, int]]) -> Node | None:
    node = var.node
    if var.kind == "trip" and var.region is not None:
        lo, hi, step = var.region.bounds  # type: ignore[misc]
        last = hi if affine.uniform(hi) else upper(g, hi) if affine.absolute else None
        known = last is not None and is_zero(lo) and affine.uniform(step)
        return g.make("cdiv", (last, step)) if known else None  # type: ignore[arg-type]
    if node is None:
        return None
    if var.kind == "lane":
        return node.args[1] if is_zero(node.args[0]) else None
    if var.kind == "pid":
        return g.npid(node.attrs["axis"])
    if var.kind == "vpid":
        return node.attrs["count"]
    if var.kind in ("floordiv", "mod"):
        whole, divisor = node.args
        if (whole.id, divisor.id) not in halves or whole.op != "pid":
            return None
        return g.one if var.kind == "mod" else g.npid(whole.attrs["axis"])
    return None

"""Indices that wrap around: `rows % M` keeps a tile inside the matrix, surplus lanes read rows twice.

Those lanes contribute nothing where the adjoint is zero on them, because the upstream gradient was loaded
under `rows < M`. Then the gradient is written at `rows` under that mask, which other passes can prove
disjoint. The zero is proven by following where values can differ from zero. An index of a load in the
address stays wrapped: that load may have no mask, and reads beyond its array otherwise.
"""

from __future__ import annotations

from ..ir.nodes import Node, nodes_in, sides
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..prove.masks import Bound, upper_bounds
from .sweep import Reverse, writes


def unwrap(reverse: Reverse) -> None:
    """Replace `index % n` in a write's address by `index`, where lanes with index >= n carry no adjoint."""
    g = reverse.kernel.graph
    for write in writes(reverse.effects):
        held = support(write.value)
        table: dict[Node, Node] = {}
        for node in [n for n in nodes_in([write.offset]) if n.op == "mod"]:
            index, n = node.args
            if len(node.shape) == 1 and any(core is index and bound is n for core, bound, _ in held):
                table[node] = index
        if not table:
            continue
        g.here, g.reverse = write.region, True
        mask, unwrapped = write.mask, set(table.values())
        for core, bound, axis in sorted(held, key=lambda b: (b[2], b[0].id)):
            if core not in unwrapped:
                continue
            inside = g.along(g.compare("<", core, bound), axis, len(write.offset.shape))
            mask = g.both(mask, inside)
        loads = [n for n in nodes_in([write.offset]) if n.op == "load"]
        table |= {load: load for load in loads if any(n in table for n in nodes_in(load.args))}
        write.offset = Rewriter(g, table.get).node(write.offset)
        if mask is not None and mask.shape != write.offset.shape:
            mask = g.broadcast(mask, write.offset.shape)
        write.mask = mask
        g.here = g.top
        reason = f"gradient of {write.base.attrs['name']}: lanes that wrap around carry no adjoint"
        reverse.say(write.line, "unwrapped", "support of the adjoint", reason)


def support(node: Node) -> frozenset[Bound]:
    """Conditions `index < bound` without which a block is zero, each along one axis."""
    return _support(node, {})


def _support(node: Node, memo: dict[Node, frozenset[Bound]]) -> frozenset[Bound]:
    if node not in memo:
        memo[node] = frozenset(_found(node, memo))
    return memo[node]


def _found(node: Node, memo: dict[Node, frozenset[Bound]]) -> frozenset[Bound] | set[Bound]:
    op, args = node.op, node.args
    if op == "load":
        zero = len(args) == 4 and is_zero(args[3])
        return upper_bounds(args[2], len(node.shape)) if zero else frozenset()
    if op in ("cast", "neg"):
        return _support(args[0], memo)
    if op == "broadcast":
        return _aligned(args[0], node, memo)
    if op in ("mul", "div"):
        return frozenset().union(*(_aligned(arg, node, memo) for arg in args[: 2 if op == "mul" else 1]))
    if op in ("add", "sub"):
        return _aligned(args[0], node, memo) & _aligned(args[1], node, memo)
    if op == "where":
        cond, a, b = args
        if is_zero(b):
            return upper_bounds(cond, len(node.shape)) | _aligned(a, node, memo)
        return _aligned(b, node, memo) if is_zero(a) else _aligned(a, node, memo) & _aligned(b, node, memo)
    if op == "ifout":
        return frozenset.intersection(*(_support(side, memo) for side in sides(node)))
    if op == "dot" and len(node.shape) == 2:
        rows = {b for b in _support(args[0], memo) if b[2] == 0}
        return rows | {b for b in _support(args[1], memo) if b[2] == 1}
    if op == "permute":
        order = node.attrs["order"]
        return {(core, bound, order.index(axis)) for core, bound, axis in _support(args[0], memo)}
    if op == "expand":
        at = node.attrs["axis"]
        return {(core, bound, axis + (axis >= at)) for core, bound, axis in _support(args[0], memo)}
    if op == "reduce" and node.attrs["fn"] == "sum":
        at = node.attrs["axis"]
        return {(core, bound, a - (a > at)) for core, bound, a in _support(args[0], memo) if a != at}
    return frozenset()


def _aligned(arg: Node, node: Node, memo: dict[Node, frozenset[Bound]]) -> frozenset[Bound]:
    """The support of an argument, axes counted as in the result it is broadcast to."""
    shift = len(node.shape) - len(arg.shape)
    return frozenset((core, bound, axis + shift) for core, bound, axis in _support(arg, memo))

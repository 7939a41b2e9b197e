"""Tiles of scores that an owner kernel's products take transposed, formed that way.

    s = tl.dot(q, k_t) * value                          s = tl.dot(k, tl.trans(q)) * value
    p = tl.exp2(s - row_max[:, None])                   p = tl.exp2(s - row_max[None, :])
    d_v_sum += tl.dot(tl.trans(p.to(half)), d)          d_v_sum += tl.dot(p.to(half), d)

A product takes its left operand out of registers, where a tile lies that was computed. Transposed it would
have to go through shared memory first, and all warps would wait for it. What lies in memory is turned for
nothing. The owner of keys in an attention's backward takes its scores so, both for dV and for dK: by hand
that, with less to do for each score, took 15 % of the time of forward and backward of a causal one on an H200
(bench/results/turns-h200.json).

It is done where every product of the kernel that takes a computed tile takes it transposed, so that no
product is formed twice. Elements and sums are the same as before.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...source import words
from ..ir.graph import ELEMENTWISE, Graph
from ..ir.kinds import LANEWISE, STRETCHING
from ..ir.nodes import If, Node, nodes_in, sides
from ..ir.rewriter import Rewriter

ROWS = 64  # that a product on Hopper's tensor cores takes at once: of fewer it is one of an older kind
_SWAPPED = (1, 0)
_ALIKE = (ELEMENTWISE | LANEWISE | words("not invert floordiv mod")) - STRETCHING


class _Stays(Exception):
    """The tile has something in it that is not turned."""


def turned(g: Graph, effects: list) -> list | None:
    """The effects with tiles formed transposed; None where there are none, or not all can be."""
    products = [n for n in nodes_in(effects) if n.op == "dot"]
    of_tiles = [n for n in products if _is_turned(n)]
    turn = _Turn(g)
    try:
        table = {n: turn.product(n) for n in of_tiles}
    except _Stays:
        return None
    if not table or any(n.op == "phi" for new in table.values() for n in _within(new)):
        return None
    made = Rewriter(g, table.get).effects(effects)
    return made if _count(made) == len(products) else None


def rows_of(effects: list) -> set[str]:
    """The block sizes that say how many rows such tiles have when they are turned."""
    turned_ones = (n.args[0].shape[0] for n in nodes_in(effects) if n.op == "dot" and _is_turned(n))
    return {size.attrs["name"] for size in turned_ones if size.op == "constexpr"}


def _count(effects: list) -> int:
    return sum(n.op == "dot" for n in nodes_in(effects))


def _is_turned(product: Node) -> bool:
    """Whether a product takes a computed tile transposed."""
    left = product.args[0]
    return left.op == "permute" and len(product.args) == 2 and any(n.op == "dot" for n in _within(left))


def _within(value: Node) -> Iterable[Node]:
    """What a value is made of in one step of a loop."""
    seen, stack = set[Node](), [value]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += [*node.args, *(sides(node) if node.op == "ifout" else ())]
    return seen


class _Turn:
    """Values of two axes with their axes swapped."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.before = g.count  # what is there already keeps its name: other kernels have it too
        self.made: dict[Node, Node] = {}
        self.branches: dict[If, If] = {}

    def product(self, dot: Node) -> Node:
        """The same product of a tile that needs no transposing any more."""
        with self.g.at(dot.home):
            new = self.g.again(dot, [self.of(dot.args[0].args[0]), dot.args[1]])
        new.hint = new.hint or dot.hint
        return new

    def of(self, node: Node) -> Node:
        if not node.shape:
            return node
        if len(node.shape) != 2:
            raise _Stays
        if node not in self.made:
            new = self._of(node)
            if new.id > self.before:
                new.hint, new.line = new.hint or node.hint, new.line or node.line
                new.upstream = new.upstream or node.upstream
            self.made[node] = new
        return self.made[node]

    def _of(self, node: Node) -> Node:
        g, shape = self.g, node.shape[::-1]
        if node.op == "permute":
            return node.args[0]
        if node.op == "ifout":
            return self._chosen(node)
        before, g.reverse, g.line = (g.reverse, g.line), node.reverse, node.line
        try:
            with g.at(node.home):
                if node.op == "expand":
                    return g.expand(node.args[0], 1 - node.attrs["axis"])
                if node.op == "full":
                    return g.make("full", node.args, node.attrs, node.dtype, shape)
                if node.op == "dot" and len(node.args) == 2:
                    left, right = (self._permuted(arg) for arg in node.args)
                    return g.make("dot", (right, left), node.attrs, node.dtype, shape)
                if node.op in _ALIKE or node.op == "broadcast":
                    args = [self.of(arg) for arg in node.args]
                    return g.make(node.op, args, node.attrs, node.dtype, shape)
        finally:
            g.reverse, g.line = before
        raise _Stays

    def _permuted(self, operand: Node) -> Node:
        return self.g.make("permute", (operand,), {"order": _SWAPPED}, operand.dtype, operand.shape[::-1])

    def _chosen(self, node: Node) -> Node:
        """What a branch that has no effects chooses."""
        stmt = node.attrs["if"]
        then, other = node.attrs["then"], node.attrs["other"]
        if then is None or other is None or stmt.then_effects or stmt.other_effects:
            raise _Stays
        then, other = self.of(then), self.of(other)
        if stmt not in self.branches:
            self.branches[stmt] = If(
                stmt.cond, stmt.then, stmt.other, [], [], stmt.outer, stmt.static, stmt.line
            )
        new = self.g.merged(self.branches[stmt], then, other, node, node.home)
        new.shape = node.shape[::-1]
        return new

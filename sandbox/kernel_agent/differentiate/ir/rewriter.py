"""Rebuild a part of the graph with some values replaced. Loops and branches that change are copied with
carries of their own."""

from __future__ import annotations

from collections.abc import Callable

from .graph import Graph
from .nodes import Carry, For, GradWrite, If, Node, Store, TapeStore, reachable
from .values import loop_out


class Rewriter:
    """`replace(node)` gives a replacement or None. Unchanged parts are shared with the original."""

    def __init__(self, g: Graph, replace: Callable[[Node], Node | None]) -> None:
        self.g, self.replace = g, replace
        self.nodes: dict[Node, Node] = {}
        self.loops: dict[For, For] = {}
        self.ifs: dict[If, If] = {}

    def node(self, node: Node) -> Node:
        found = self.nodes.get(node)
        if found is not None:
            return found
        new = self.replace(node)
        if new is None:
            new = self._rebuilt(node)
        self.nodes[node] = new
        return new

    def _rebuilt(self, node: Node) -> Node:
        g = self.g
        if node.op == "loopout":
            loop = self.loop(node.attrs["loop"])
            return (
                node
                if loop is node.attrs["loop"]
                else self._named(loop_out(g, loop, node.attrs["index"]), node)
            )
        if node.op == "ifout":
            old = node.attrs["if"]
            stmt = self.branch(old)
            return node if stmt is old else stmt.outs[old.outs.index(node)]
        args = [self.node(arg) for arg in node.args]
        if all(a is b for a, b in zip(args, node.args, strict=True)):
            return node
        here, g.here = g.here, deepest([node, *args])
        new = g.again(node, args, upstream=False)
        g.here = here
        return self._named(new, node)

    def _named(self, new: Node, old: Node) -> Node:
        if new.hint is None:
            new.hint = old.hint
        return new

    def loop(self, loop: For) -> For:
        if loop in self.loops:
            return self.loops[loop]
        if not any(isinstance(n, Node) and self.replace(n) is not None for n in reachable([loop])):
            self.loops[loop] = loop
            return loop
        phis = {c.phi: self.g.twin(c.phi, c.phi.home) for c in loop.carries}
        new = For(loop.region, loop.outer, [], [], loop.order, None, loop.line, loop.source)
        self.loops[loop] = new
        body = Rewriter(self.g, lambda n: phis.get(n) or self._outer(n, loop))
        for carry in loop.carries:
            new.carries.append(Carry(phis[carry.phi], self.node(carry.init), body.node(carry.next)))  # type: ignore[arg-type]
        new.effects = body.effects(loop.effects)
        new.cond = None if loop.cond is None else body.node(loop.cond)
        return new

    def _outer(self, node: Node, loop: For) -> Node | None:
        """Values from outside a loop are rewritten by the outer rewriter, so that they are shared."""
        if node.home.inside(loop.region):
            return self.replace(node)
        return self.node(node)

    def branch(self, stmt: If) -> If:
        if stmt in self.ifs:
            return self.ifs[stmt]
        cond = self.node(stmt.cond)
        sides = [
            [None if o.attrs[k] is None else self.node(o.attrs[k]) for o in stmt.outs]
            for k in ("then", "other")
        ]
        then, other = self.effects(stmt.then_effects), self.effects(stmt.other_effects)
        same = cond is stmt.cond and all(
            a is o.attrs["then"] and b is o.attrs["other"] for a, b, o in zip(*sides, stmt.outs, strict=True)
        )
        if same and then == stmt.then_effects and other == stmt.other_effects:
            self.ifs[stmt] = stmt
            return stmt
        new = If(cond, stmt.then, stmt.other, then, other, stmt.outer, stmt.static, stmt.line)
        for out, a, b in zip(stmt.outs, *sides, strict=True):
            attrs = {**out.attrs, "then": a, "other": b, "if": new}
            copy = self.g.fresh("ifout", attrs, out.dtype, out.shape, out.home, (cond,))
            copy.active, copy.hint, copy.upstream, copy.line = out.active, out.hint, out.upstream, out.line
            new.outs.append(copy)
        self.ifs[stmt] = new
        return new

    def effects(self, effects: list) -> list:
        return [self.effect(e) for e in effects]

    def effect(self, effect: object) -> object:
        if isinstance(effect, For):
            return self.loop(effect)
        if isinstance(effect, If):
            return self.branch(effect)
        if isinstance(effect, TapeStore):
            kept = None if effect.mask is None else self.node(effect.mask)
            index, value = self.node(effect.index), self.node(effect.value)
            return TapeStore(effect.buffer, index, value, effect.region, kept)
        assert isinstance(effect, (Store, GradWrite))
        offset, value = self.node(effect.offset), self.node(effect.value)
        mask = None if effect.mask is None else self.node(effect.mask)
        if offset is effect.offset and value is effect.value and mask is effect.mask:
            return effect
        if isinstance(effect, Store):
            return Store(self.node(effect.base), offset, mask, value, effect.kind, effect.region, effect.line)
        return GradWrite(self.node(effect.base), offset, mask, value, effect.region, effect.line)


def deepest(nodes: list[Node]):
    return max((n.home for n in nodes), key=lambda region: region.depth)

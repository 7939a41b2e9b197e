"""Rebuild a part of the graph with some values replaced. Loops and branches that change are copied with
carries of their own."""

from __future__ import annotations

from collections.abc import Callable

from .graph import Graph
from .nodes import Carry, For, If, Node, mapped, nodes_in
from .values import loop_out


class Rewriter:
    """`replace(node)` gives a replacement or None. Unchanged parts are shared with the original."""

    def __init__(self, g: Graph, replace: Callable[[Node], Node | None]) -> None:
        self.g, self.replace = g, replace
        self.nodes: dict[Node, Node] = {}
        self.loops: dict[For, For] = {}
        self.ifs: dict[If, If] = {}

    def node(self, node: Node) -> Node:
        if node not in self.nodes:
            new = self.replace(node)
            self.nodes[node] = self._rebuilt(node) if new is None else new
        return self.nodes[node]

    def _rebuilt(self, node: Node) -> Node:
        g = self.g
        if node.op == "loopout":
            old, index = node.attrs["loop"], node.attrs["index"]
            loop = self.loop(old)
            return node if loop is old else self._named(loop_out(g, loop, index), node)
        if node.op == "ifout":
            old = node.attrs["if"]
            stmt = self.branch(old)
            return node if stmt is old else stmt.outs[old.outs.index(node)]
        args = [self.node(arg) for arg in node.args]
        if all(a is b for a, b in zip(args, node.args, strict=True)):
            return node
        with g.at(max((n.home for n in (node, *args)), key=lambda region: region.depth)):
            return self._named(g.again(node, args, upstream=False), node)

    def _named(self, new: Node, old: Node) -> Node:
        if new.hint is None:
            new.hint = old.hint
        return new

    def loop(self, loop: For) -> For:
        if loop in self.loops:
            return self.loops[loop]
        if not any(self.replace(n) is not None for n in nodes_in([loop])):
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
        then, other = ([o.attrs[k] and self.node(o.attrs[k]) for o in stmt.outs] for k in ("then", "other"))
        bodies = self.effects(stmt.then_effects), self.effects(stmt.other_effects)
        outs = list(zip(stmt.outs, then, other, strict=True))
        same = all(a is o.attrs["then"] and b is o.attrs["other"] for o, a, b in outs)
        if same and cond is stmt.cond and bodies == (stmt.then_effects, stmt.other_effects):
            self.ifs[stmt] = stmt
            return stmt
        new = If(cond, stmt.then, stmt.other, *bodies, stmt.outer, stmt.static, stmt.line)
        for out, a, b in outs:
            self.g.merged(new, a, b, out, out.home)
        self.ifs[stmt] = new
        return new

    def effects(self, effects: list) -> list:
        return [self.effect(e) for e in effects]

    def effect(self, effect: object) -> object:
        if isinstance(effect, For):
            return self.loop(effect)
        return self.branch(effect) if isinstance(effect, If) else mapped(effect, self.node)

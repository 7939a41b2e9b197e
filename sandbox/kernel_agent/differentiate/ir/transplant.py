"""Moves a whole sweep into a new loop: what depends on anything replaced is made again inside it.

Loops keep their order, their carries and the forward loop that they undo; regions that two loops share stay
shared. What does not depend on anything replaced is left where it is, and so leaves the new loop.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph
from .nodes import Carry, For, GradWrite, If, Node, Region, Store, mapped, operands, reachable
from .values import loop_out


class Graft:
    """`table`: replaced nodes; what stood at the top of the kernel comes to stand in `outer`."""

    def __init__(self, g: Graph, table: dict[Node, Node], outer: Region) -> None:
        self.g, self.table = g, table
        self.regions: dict[Region, Region] = {g.top: outer}
        self.nodes: dict[Node, Node] = {}
        self.loops: dict[For, For] = {}
        self.ifs: dict[If, If] = {}
        self.varying: dict[int, bool] = {}

    def varies(self, root: object) -> bool:
        """Whether something depends on a replaced value, or stands in a loop or branch that does."""

        def parts(item: object) -> list:
            return [] if self.varying.get(id(item)) is False else operands(item)

        found = any(
            self.varying.get(id(item)) or (isinstance(item, Node) and item in self.table)
            for item in reachable([root], parts)
        )
        self.varying[id(root)] = found
        return found

    def node(self, node: Node) -> Node:
        if node in self.table:
            return self.table[node]
        if node not in self.nodes:
            if node.op in ("const", "constexpr", "param"):
                return node
            if node.home is self.g.top and not self.varies(node):
                return node
            self.nodes[node] = self._made(node)
        return self.nodes[node]

    def _made(self, node: Node) -> Node:
        g = self.g
        if node.op == "loopout":
            return self._like(loop_out(g, self.loop(node.attrs["loop"]), node.attrs["index"]), node)
        if node.op == "ifout":
            self.branch(node.attrs["if"])
            return self.nodes[node]
        if node.op == "iv":
            return self.region(node.home).iv  # type: ignore[return-value]
        args = [self.node(arg) for arg in node.args]
        with g.at(self.region(node.home)):
            return self._like(g.again(node, args), node)

    def _like(self, new: Node, old: Node) -> Node:
        new.upstream = new.upstream or old.upstream
        if new.hint is None:
            new.hint, new.line = old.hint, old.line
        return new

    def region(self, region: Region) -> Region:
        if region not in self.regions:
            assert region.parent is not None
            with self.g.at(self.region(region.parent)):
                self.regions[region] = self._region(region)
        return self.regions[region]

    def _region(self, region: Region) -> Region:
        if region.kind != "for":
            assert region.cond is not None, "a while loop is not moved"
            found = self.g.branch(self.node(region.cond), region.positive)
            found.skips = region.skips
            return found
        lo, hi, step = (self.node(n) for n in region.bounds or ())
        found = self.g.loop_region(lo, hi, step, region.call, region.line)
        if found.iv is not None and region.iv is not None:
            found.iv.hint = found.iv.hint or region.iv.hint
        return found

    def loop(self, loop: For) -> For:
        if loop in self.loops:
            return self.loops[loop]
        region = self.region(loop.region)
        new = For(region, self.region(loop.outer), order=loop.order, line=loop.line)
        self.loops[loop] = new
        for phi in (carry.phi for carry in loop.carries if carry.phi not in self.nodes):
            self.nodes[phi] = self.g.twin(phi, region)
        new.source = None if loop.source is None else self.loop(loop.source)
        new.carries = [
            Carry(self.nodes[c.phi], self.node(c.init), c.next and self.node(c.next)) for c in loop.carries
        ]
        new.effects = self.effects(loop.effects)
        return new

    def branch(self, stmt: If) -> If:
        if stmt in self.ifs:
            return self.ifs[stmt]
        cond, then, other = self.node(stmt.cond), self.region(stmt.then), self.region(stmt.other)
        new = If(cond, then, other, outer=then.parent, static=stmt.static, line=stmt.line)
        self.ifs[stmt] = new
        for out in stmt.outs:
            a, b = (out.attrs[k] and self.node(out.attrs[k]) for k in ("then", "other"))
            self.nodes[out] = self.g.merged(new, a, b, out, self.region(out.home))
        new.then_effects, new.other_effects = map(self.effects, (stmt.then_effects, stmt.other_effects))
        return new

    def effects(self, effects: list) -> list:
        """Those of a backward; a loop of the forward, that one of the backward undoes, has stores beside."""
        return [self.effect(e) for e in effects if not isinstance(e, Store)]

    def effect(self, effect: object) -> object:
        if isinstance(effect, For):
            return self.loop(effect)
        if isinstance(effect, If):
            return self.branch(effect)
        assert isinstance(effect, GradWrite)
        return replace(mapped(effect, self.node), region=self.region(effect.region))

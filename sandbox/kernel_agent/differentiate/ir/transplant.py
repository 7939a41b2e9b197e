"""Move a whole sweep into a new loop: every value, loop and branch that depends on what is replaced is made
again inside it.

Loops keep their order, their carries and the forward loop that they undo; regions that two loops share stay
shared. What does not depend on anything replaced is left where it is, and so leaves the new loop.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph
from .nodes import Carry, For, GradWrite, If, Node, Region, operands
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
        todo, seen = [root], set()
        while todo:
            item = todo.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if self.varying.get(id(item)) or (isinstance(item, Node) and item in self.table):
                self.varying[id(root)] = True
                return True
            if self.varying.get(id(item)) is False:
                continue
            todo += operands(item)
        self.varying[id(root)] = False
        return False

    def node(self, node: Node) -> Node:
        if node in self.table:
            return self.table[node]
        if node in self.nodes:
            return self.nodes[node]
        if node.op in ("const", "constexpr", "param") or (node.home is self.g.top and not self.varies(node)):
            return node
        new = self._made(node)
        self.nodes[node] = new
        return new

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
        here, g.here = g.here, self.region(node.home)
        new = g.again(node, args)
        g.here = here
        return self._like(new, node)

    def _like(self, new: Node, old: Node) -> Node:
        new.upstream = new.upstream or old.upstream
        if new.hint is None:
            new.hint, new.line = old.hint, old.line
        return new

    def region(self, region: Region) -> Region:
        found = self.regions.get(region)
        if found is not None:
            return found
        g = self.g
        here, g.here = g.here, self.region(region.parent)  # type: ignore[arg-type]
        if region.kind == "for":
            lo, hi, step = (self.node(n) for n in region.bounds or ())
            found = g.loop_region(lo, hi, step, region.call, region.line)
            if found.iv is not None and region.iv is not None:
                found.iv.hint = found.iv.hint or region.iv.hint
        else:
            assert region.cond is not None, "a while loop is not moved"
            found = g.branch(self.node(region.cond), region.positive)
            found.skips = region.skips
        g.here = here
        self.regions[region] = found
        return found

    def loop(self, loop: For) -> For:
        if loop in self.loops:
            return self.loops[loop]
        region = self.region(loop.region)
        new = For(region, self.region(loop.outer), order=loop.order, line=loop.line)
        self.loops[loop] = new
        for carry in loop.carries:
            self.phi(carry.phi, region)
        new.source = None if loop.source is None else self.loop(loop.source)
        new.carries = [
            Carry(self.nodes[c.phi], self.node(c.init), None if c.next is None else self.node(c.next))
            for c in loop.carries
        ]
        new.effects = [self.effect(e) for e in loop.effects]
        return new

    def phi(self, phi: Node, region: Region) -> None:
        if phi not in self.nodes:
            self.nodes[phi] = self.g.twin(phi, region)

    def branch(self, stmt: If) -> If:
        if stmt in self.ifs:
            return self.ifs[stmt]
        cond, then, other = self.node(stmt.cond), self.region(stmt.then), self.region(stmt.other)
        new = If(cond, then, other, outer=then.parent, static=stmt.static, line=stmt.line)
        self.ifs[stmt] = new
        for out in stmt.outs:
            sides = {k: None if out.attrs[k] is None else self.node(out.attrs[k]) for k in ("then", "other")}
            attrs = {**out.attrs, **sides, "if": new}
            copy = self.g.fresh("ifout", attrs, out.dtype, out.shape, self.region(out.home), (new.cond,))
            copy.active = out.active
            new.outs.append(self._like(copy, out))
            self.nodes[out] = copy
        new.then_effects = [self.effect(e) for e in stmt.then_effects]
        new.other_effects = [self.effect(e) for e in stmt.other_effects]
        return new

    def effect(self, effect: object) -> object:
        if isinstance(effect, For):
            return self.loop(effect)
        if isinstance(effect, If):
            return self.branch(effect)
        assert isinstance(effect, GradWrite)
        mask = None if effect.mask is None else self.node(effect.mask)
        base, offset, value = (self.node(n) for n in (effect.base, effect.offset, effect.value))
        return replace(
            effect, base=base, offset=offset, mask=mask, value=value, region=self.region(effect.region)
        )

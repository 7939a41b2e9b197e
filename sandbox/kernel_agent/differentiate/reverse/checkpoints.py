"""Square-root checkpoints: a long loop whose state has to be had backwards, in the memory of two short ones.

The forward sweep keeps the state at the start of every segment only. The reverse loop walks the segments,
last first; each is run forward once more from its checkpoint with the state of its own steps taped, and then
backwards. With segments of about the square root of the steps, both buffers have about that many entries; the
price is one more forward sweep.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.nodes import Carry, For, Node, Region, walk
from ..ir.transplant import Graft
from ..ir.values import loop_out

# On the host: steps of a segment, checkpoints of a program.
SEGMENT, CHECKPOINTS = "tape_segment", "tape_checkpoints"


class Segment(Graft):
    """Copies what stands in one loop to a loop over one of its segments; everything else stays."""

    def __init__(self, g: Graph, table: dict[Node, Node], source: Region, part: Region) -> None:
        super().__init__(g, table, part)
        self.source = source
        self.regions = {source: part}

    def node(self, node: Node) -> Node:
        return super().node(node) if node in self.table or node.home.inside(self.source) else node

    def varies(self, root: object) -> bool:
        return True


def possible(loop: For) -> bool:
    """Whether a reverse loop can be cut into segments: nothing inside it reads a tape of its own."""
    inner = [effect for effect in walk(loop.effects) if isinstance(effect, For)]
    return all(not e.tape and not e.provides and (e.source is None or not e.source.tape) for e in inner)


def places(g: Graph, source: For) -> tuple[Node, Node, Region]:
    """The number of a step of the whole loop, the number of a segment, and the steps of one."""
    lo, hi, step = source.region.bounds  # type: ignore[misc]
    length = g.param(SEGMENT)
    g.here = source.region
    at = g.make("floordiv", (g.sub(source.region.iv, lo), step))  # type: ignore[arg-type]
    g.here = source.outer
    trips = g.make("cdiv", (g.sub(hi, lo), step))
    parts = g.loop_region(g.const(0), g.make("cdiv", (trips, length)), g.one, "range", source.line)
    parts.iv.hint = "part"  # type: ignore[union-attr]
    g.here = parts
    start = g.add(lo, g.mul(g.mul(parts.iv, length), step))  # type: ignore[arg-type]
    end = g.make("minimum", (hi, g.add(start, g.mul(length, step))))
    segment = g.loop_region(start, end, step, "range", source.line)
    segment.iv.hint = source.region.iv.hint  # type: ignore[union-attr]
    return at, parts.iv, segment  # type: ignore[return-value]


def again(g: Graph, source: For, segment: Region, starts: dict[int, Node]) -> tuple[For, dict[int, Node]]:
    """The forward of one segment, from the state at its start: the loop, and the carries of its steps."""
    made = For(segment, segment.parent, order="forward", line=source.line)  # type: ignore[arg-type]
    table: dict[Node, Node] = {source.region.iv: segment.iv}  # type: ignore[dict-item]
    phis = {}
    for k in starts:
        old = source.carries[k].phi
        phis[k] = table[old] = g.twin(old, segment)
    copy = Segment(g, table, source.region, segment)
    made.carries = [Carry(phis[k], start, copy.node(source.carries[k].next)) for k, start in starts.items()]  # type: ignore[arg-type]
    return made, phis


def moved(g: Graph, source: For, segment: Region, value: Node) -> Node:
    """A value of one step, without its state, in the loop over a segment."""
    table: dict[Node, Node] = {source.region.iv: segment.iv}  # type: ignore[dict-item]
    return Segment(g, table, source.region, segment).node(value)


def segmented(g: Graph, loop: For, source: For, forward: For, phis: dict[int, Node]) -> For:
    """Turn a reverse loop into one over segments; returns the loop over one's steps, undoing `forward`."""
    segment, parts = forward.region, forward.outer
    inner = For(segment, parts, order="reverse", line=loop.line, source=forward)
    table: dict[Node, Node] = {source.region.iv: segment.iv}  # type: ignore[dict-item]
    table |= {source.carries[k].phi: phi for k, phi in phis.items()}
    outer: list[Node] = []
    for carry in loop.carries:
        outer.append(g.twin(carry.phi, parts))
        table[carry.phi] = g.twin(carry.phi, segment)
    copy = Segment(g, table, source.region, segment)
    inner.carries = [
        Carry(table[c.phi], start, copy.node(c.next))  # type: ignore[arg-type]
        for c, start in zip(loop.carries, outer, strict=True)
    ]
    inner.effects = [copy.effect(effect) for effect in loop.effects]
    loop.region, loop.effects, loop.provides = parts, [inner], {}
    loop.carries = [
        Carry(phi, carry.init, loop_out(g, inner, k))
        for k, (phi, carry) in enumerate(zip(outer, loop.carries, strict=True))
    ]
    for out in inner.outs.values():
        out.upstream = True
    return inner

"""A long loop of few programs, shared out: several walk a part each, and their sums are added up afterwards.

    for start in range(0, V, BLOCK):        for start in range(split * BLOCK, V, splits * BLOCK):
        d_x += tl.dot(...)                      d_x += tl.dot(...)
    tl.store(d_x_ptr + rows, d_x)           tl.store(d_x_ptr + split * span + rows, d_x)

A program that owns a tile of rows walks a whole vocabulary for it: with 64 tiles half of a GPU has nothing to
do. All that such a loop leaves is sums from zero, and what is stored is linear in them, so that the parts add
up; what is added atomically may be added in parts. Which call has too few programs is asked of its grid; how
many shares are worth it is for the tuner.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.nodes import For, GradWrite, Node, TapeStore, nodes_in
from ..ir.simplify import is_zero
from ..reverse.sweep import Reverse
from .owner import PROGRAMS

LEAST = 16  # steps of a loop that is worth it


@dataclass(frozen=True)
class Shared:
    """The loop of a kernel, what it stores, and the grid axis that the shares lie along."""

    g: Graph
    loop: For
    writes: list[GradWrite]
    axis: int
    stores: bool = False  # whether its steps store tiles

    @property
    def note(self) -> str:
        """What the kernel says of it."""
        after = "; their sums are added up afterwards" if self.bases else ""
        return f"programs along axis {self.axis} share the loop out{after}"

    @property
    def bases(self) -> list[str]:
        return list(dict.fromkeys(w.base.attrs["name"] for w in self.writes if w.kind == "store"))

    @contextlib.contextmanager
    def walked(self) -> Iterator[list[GradWrite | For]]:
        """What a share stores; while it is written down the loop has the steps of one."""
        g = self.g
        split = g.intern("pid", (), {"axis": self.axis, "kernel": "shared"}, "int32", ())
        splits = g.intern("npid", (), {"axis": self.axis, "kernel": "shared"}, "int32", ())
        region = self.loop.region
        assert region.bounds is not None
        whole = low, high, step = region.bounds
        made: list[GradWrite | For] = [self.loop] if self.stores else []
        with g.at(g.top):
            region.bounds = (g.add(low, g.mul(split, step)), high, g.mul(splits, step))
            for write in self.writes:
                if write.kind != "store":
                    made.append(write)
                    continue
                span = g.param(f"span_{write.base.attrs['name']}")
                offset = g.add(g.mul(g.cast(split, "int64"), span), write.offset)
                made.append(
                    GradWrite(write.base, offset, write.mask, write.value, g.top, write.line, "store")
                )
        try:
            yield made
        finally:
            region.bounds = whole


def find(reverse: Reverse, grid: tuple[int, ...]) -> Shared | None:
    """The one loop of a main kernel, if all that it stores is linear in sums that the loop makes."""
    g = reverse.kernel.graph
    effects = [e for e in reverse.effects if not isinstance(e, For) or e.effects]  # others only make values
    storing = [e for e in effects if isinstance(e, For) and _only_stores(e)]
    writes = [e for e in effects if e not in storing]
    loops = {n.attrs["loop"] for n in nodes_in(writes) if n.op == "loopout"} | {*storing}
    if len(grid) > 2 or len(loops) != 1 or not all(_is_part(w, reverse) for w in writes):
        return None
    if len({w.base for w in writes}) < len({(w.base, w.kind) for w in writes}):  # some both stored and added
        return None
    (loop,) = loops
    bare = loop in storing or not loop.effects
    plain = bare and not (loop.tape or loop.provides) and loop.cond is None and loop.outer is g.top
    phis = {c.phi for c in loop.carries}
    sums = all(is_zero(c.init) and _adds(c.next, c.phi, phis) for c in loop.carries)
    places = [n for w in writes for n in (w.offset, w.mask) if n is not None]
    if not plain or not sums or _holds(places) or any(n.op == "ifout" for n in nodes_in(writes)):
        return None
    linear = all(_linear(w.value) for w in writes) and not phis & set(nodes_in(_stored(loop)))
    return Shared(g, loop, writes, len(grid), loop in storing) if linear else None


def _only_stores(loop: For) -> bool:
    """Whether all that a loop does in its steps is to store tiles."""
    return all(isinstance(e, TapeStore) or isinstance(e, For) and not e.effects for e in loop.effects)


def _stored(loop: For) -> list[Node]:
    """The tiles that the steps of a loop store."""
    return [e.value for e in loop.effects if isinstance(e, TapeStore)]


def offers(reverse: Reverse, grid: tuple[int, ...]) -> bool:
    """Whether the traced call has few programs, each with many steps."""
    shared = find(reverse, grid)
    if shared is None or math.prod(grid) >= PROGRAMS:
        return False
    g = reverse.kernel.graph
    low, high, step = (g.concrete(n, g.launched(grid)) for n in shared.loop.region.bounds or ())
    return all(isinstance(n, int) for n in (low, high, step)) and high - low >= LEAST * step


def _is_part(effect: object, reverse: Reverse) -> bool:
    """Whether an effect stores or adds one program's part of a gradient, which nothing decides upon."""
    return (
        isinstance(effect, GradWrite)
        and effect.kind in ("store", "atomic_add")
        and effect.region is reverse.kernel.graph.top
        and effect.base.op == "param"
        and effect.base.attrs["name"] not in reverse.kernel.inplace
    )


def _adds(node: Node | None, phi: Node, phis: set[Node]) -> bool:
    """Whether a step only adds to a carry, and what it adds hangs on no sum so far."""
    if node is None or node.op != "add":
        return False
    return any(a is phi and not phis & set(nodes_in([b])) for a, b in (node.args, node.args[::-1]))


def _holds(nodes: list[Node]) -> bool:
    """Whether values hang on what a loop leaves."""
    return any(n.op == "loopout" for n in nodes_in(nodes))


def _linear(node: Node) -> bool:
    """Whether a value is a sum of the loop's sums, times what it leaves alone."""
    if node.op == "loopout":
        return True
    if node.op == "reduce" and node.attrs["fn"] == "sum" or node.op in ("neg", "cast", "expand", "broadcast"):
        return (node.op != "cast" or node.dtype == "float32") and _linear(node.args[0])
    if node.op == "where":
        cond, *sides = node.args
        return not _holds([cond]) and all(is_zero(side) or _linear(side) for side in sides)
    if node.op in ("add", "sub"):
        return all(map(_linear, node.args))
    held = [_holds([arg]) for arg in node.args]
    if node.op == "mul":
        return sum(held) == 1 and _linear(node.args[held.index(True)])
    return node.op == "div" and held == [True, False] and _linear(node.args[0])

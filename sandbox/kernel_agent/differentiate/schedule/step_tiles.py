"""Loops that run backwards over single steps of a linear recurrence, walked in tiles of steps.

    for back in range(T):                      for first in range(0, T, 64):
        t = T - 1 - back                           t = T - 1 - (first + tl.arange(0, 64))
        d_h_2 = d_h + load(d_h_ptr + ...)          d_h_2 = scan((factors, load(...) + what is carried in))
        store(d_x_ptr + ..., d_h_2)                store(d_x_ptr + ..., d_h_2)
        d_a += d_h_2 * before                      d_a += tl.sum(where(inside, d_h_2 * before, 0), 0)
        d_h = d_h_2 * a                            d_h = the last row of d_h_2 * a

Each step waits for its loads, so that a GPU does little but wait. What steps compute for themselves is
computed for all of a tile at once, as values with a leading axis (`lifted_steps`). What they carry on is
found by a scan where it is linear, c' = f c + g, with f and g free of what the loop carries, and by a sum
over the tile where steps only add to it (`linear_carries`). Row i of a tile is step T - 1 - (first + i):
rows follow each other as the steps of the loop do, and rows beyond its end come last, so that no other
depends on them. Those load and store nothing, and are left out of sums.

The scan is of the first value s = c + u that takes the carry: s[i] = f[i - 1] s[i - 1] + (g[i - 1] + u[i]),
with f and g of the step before loaded again where they vary. It multiplies factors with each other first.
Where they are not known to be 1 at most, such a product may have no float32 although each step's result has
one: `linear_steps` (`write/helpers.py`) asks each tile, and takes one step after the other if so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..ir.graph import Graph
from ..ir.names import LINEAR_STEP, LINEAR_STEPS
from ..ir.nodes import Carry, For, Node, Region, reachable
from ..ir.ranges import at_most_one
from ..ir.simplify import is_number
from ..reverse.sweep import Reverse
from .lifted_steps import Lifted, Tile
from .linear_carries import Body, Linear, Stays

STEPS = 64  # of a tile
FEWEST = 16  # that are worth it
HELD = 4096  # elements of a tile, of which programs hold several in registers
EACH = 32 * 16  # elements of a tile that a warp has
MOST = 1 << 17  # elements of a tile at all


@dataclass
class StepTiles:
    """A loop, and what it consists of as one over tiles of steps."""

    loop: For
    region: Region
    carries: list[Carry]
    effects: list
    steps: int
    largest: int  # elements of one step's values, in the traced call

    @property
    def note(self) -> str:
        """What the kernel says of it."""
        names = ", ".join(f"`{carry.phi.hint}`" for carry in self.carries)
        return f"line {self.loop.line}: {names}: {self.steps} steps at a time, by a scan"


def find(reverse: Reverse, effects: list, steps: int) -> list[StepTiles]:
    """The loops that can be walked so, with so many steps in a tile: a power of two."""
    g = reverse.kernel.graph
    if reverse.kernel.inplace or steps < 2 or steps & (steps - 1):
        return []
    found = []
    for loop in [item for item in reachable(effects) if isinstance(item, For) and _single_steps(item)]:
        before = g.here, g.reverse, g.line
        g.reverse = True
        try:
            found.append(_Tiled(g, loop, steps).made())
        except (Stays, RecursionError):
            continue
        finally:
            g.here, g.reverse, g.line = before
    return found


def offers(reverse: Reverse, effects: list) -> list[dict[str, Any]]:
    """Configurations with as many steps in a tile as registers hold, and warps for those."""
    found = find(reverse, effects, FEWEST)
    largest = max((tiles.largest for tiles in found), default=0)
    steps = STEPS
    while steps * largest > HELD and steps > FEWEST:
        steps //= 2
    if not found or steps * largest > HELD:
        return []
    return [{"scan": steps}, {"scan": steps, "num_warps": max(1, min(8, steps * largest // EACH))}]


@contextmanager
def walked(found: list[StepTiles]) -> Iterator[None]:
    """While kernels are written down, such loops walk tiles."""
    before = [(t.loop, t.loop.region, t.loop.carries, t.loop.effects, t.loop.provides) for t in found]
    for tiles in found:
        loop = tiles.loop
        loop.region, loop.carries, loop.effects = tiles.region, tiles.carries, tiles.effects
        loop.order, loop.provides = "forward", {}
    try:
        yield
    finally:
        for loop, loop.region, loop.carries, loop.effects, loop.provides in before:
            loop.order = "reverse"


def _single_steps(loop: For) -> bool:
    """Whether a loop walks single steps backwards, as many as are known before it, and carries sums."""
    region = loop.region
    plain = region.call.split(".")[-1] == "range" and not region.stages and not loop.waits
    if loop.order != "reverse" or not plain or loop.cond is not None or loop.tape or region.bounds is None:
        return False
    floats = all(c.phi.dtype in ("float32", "float64") and c.next is not None for c in loop.carries)
    return is_number(region.bounds[2], 1) and bool(loop.carries) and floats


class _Tiled:
    """A loop over steps as one over tiles of them."""

    def __init__(self, g: Graph, loop: For, steps: int) -> None:
        self.g, self.loop, self.steps = g, loop, steps
        self.body, self.tile = Body(g, loop), Tile(g, loop, steps)
        tile = self.tile
        self.now = Lifted(self.body, tile, tile.number, tile.inside)
        self.before = Lifted(self.body, tile, tile.earlier, tile.follows)  # the step before each
        self.now.writes = True
        self.phis = [g.twin(carry.phi, tile.region) for carry in loop.carries]
        self.solving: set[int] = set()

    def made(self) -> StepTiles:
        sums = {k: rest for k in range(len(self.phis)) if (rest := self._summand(k)) is not None}
        for k in range(len(self.phis)):
            if k not in sums:
                linear = self.body.linear(k)
                self.now.taken[linear.taken] = partial(self._solved, k, linear)
        effects = self.now.effects(self.loop.effects)
        carries = []
        for k, carry in enumerate(self.loop.carries):
            with self.g.at(self.tile.region):
                after = self._added(k, sums[k]) if k in sums else self._last(k)
            carries.append(Carry(self.phis[k], carry.init, after))
        largest = max(self.now.largest, self.before.largest)
        if largest * self.steps > MOST:
            raise Stays
        return StepTiles(self.loop, self.tile.region, carries, effects, self.steps, largest)

    def _summand(self, k: int) -> Node | None:
        """What steps add to a carry that nothing but the sum hangs on."""
        if not self.body.only_summed(k):
            return None
        factor, rest = self.body.form(k, self.loop.carries[k].phi)
        return rest if factor is not None and is_number(factor, 1) else None

    def _added(self, k: int, rest: Node) -> Node:
        """The sum after a tile."""
        g, phi = self.g, self.phis[k]
        value, tall = self.now.of(rest)
        if value.dtype != phi.dtype:
            value = g.cast(value, phi.dtype)
        return g.add(phi, self.now.summed(value, tall, phi))

    def _last(self, k: int) -> Node:
        """A carry after the last step of a tile."""
        g, after, phi = self.g, self.loop.carries[k].next, self.phis[k]
        assert after is not None
        value, tall = self.now.of(after)
        if not tall:
            return value
        if after.shape != phi.shape or after.dtype != phi.dtype:
            raise Stays
        last = self.tile.along(self.tile.last, len(phi.shape))
        self.tile.named(value, "d_next")
        return g.reduce("sum", g.where(last, value, g.number(0)), 0, dtype=phi.dtype)

    def _solved(self, k: int, linear: Linear) -> Node:
        """The first value that takes a carry, in every step of a tile."""
        if k in self.solving:
            raise Stays
        self.solving.add(k)
        g, tile, phi = self.g, self.tile, self.phis[k]
        rank = len(phi.shape)
        start: Node = g.number(0)
        if linear.rest is not None:
            start = tile.wide(*self._of_before(linear.rest, phi), phi.shape)
        value = g.where(tile.along(tile.begins, rank), tile.aligned(phi, False, rank), start)
        for term in linear.added:
            value = g.add(tile.wide(*self.now.of(term), phi.shape), value)
        value = tile.wide(value, True, phi.shape)
        if linear.factor is not None:
            value = self._scan(linear.factor, value, phi)
        self.solving.discard(k)
        return value

    def _of_before(self, node: Node, like: Node) -> tuple[Node, bool]:
        """A value of the step before, in the type of a carry."""
        value, tall = self.before.of(node)
        return (value if value.dtype == like.dtype else self.g.cast(value, like.dtype)), tall

    def _scan(self, factor: Node, value: Node, phi: Node) -> Node:
        g, tile, shape = self.g, self.tile, value.shape
        wide = tile.named(tile.wide(*self._of_before(factor, phi), phi.shape), "factors")
        tile.named(value, "d_given")
        if at_most_one(factor):
            attrs = {"axis": 0, "reverse": False, "text": LINEAR_STEP}
            found = g.make("affine", (wide, value), attrs, phi.dtype, shape)
        else:
            follows = tile.along(tile.follows, len(phi.shape))
            args = (tile.along(tile.rows, len(phi.shape)), g.where(follows, wide, g.number(1)), value)
            attrs = {"fn": LINEAR_STEPS, "text": f"{LINEAR_STEPS}({{}}, {{}}, {{}})"}
            found = g.make("user", args, attrs, phi.dtype, shape)
        found.upstream = True
        return found

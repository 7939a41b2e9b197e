"""Gradients in half that programs add to at few places, as an embedding's.

Sums are kept in float32: zeros for each element of the tensor before the launch, and a pass over all of it
that rounds them after it. Where programs reach few elements, two more launches with the addresses of this one
move fewer bytes: one that clears the sums that are added to, one that rounds them into a gradient of zeros.
Several programs that add to one element clear and round it alike. How many elements a launch reaches at most
the host knows, and asks in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

from ..ir.graph import Graph
from ..ir.names import stem
from ..ir.nodes import HALF, For, GradWrite, Node, placed, real
from ..reverse.forward_values import trip_count
from ..reverse.sweep import Reverse
from .second_launch import is_straight, picked


@dataclass
class Scattered:
    """One gradient: how many elements a launch adds to at most, and what the launches before and after do."""

    base: str
    reached: Node
    cleared: list
    rounded: list

    @property
    def sums(self) -> str:
        """What the last launch calls the sums."""
        return f"sums_{self.base}"

    @property
    def few(self) -> str:
        """The host's name for whether they are made."""
        return f"few_{self.base}"

    def name(self, kernel: str, what: str) -> str:
        return f"{kernel}_{what}_{stem(self.base)}"


def are_few(reached: int | None, numel: int) -> bool:
    """What `sums_for` asks in each call. Either way is 10 bytes for each element that it looks at; programs
    of a launch look at scattered ones four to five times as slowly, those of embeddings on an H200. A launch
    whose traced call needs none of it has no such kernels."""
    return reached is not None and 6 * reached < numel


def find(reverse: Reverse, axes: list[int], able: Callable[[Node], bool]) -> list[Scattered]:
    """Of the gradients that only the main kernel writes, for which `able` holds."""
    g, made = reverse.kernel.graph, []
    found = list(placed(reverse.effects, GradWrite))
    for base in dict.fromkeys(w.base for w, _ in found):
        mine = [(w, loops) for w, loops in found if w.base is base]
        if base.op != "param" or real(base.attrs["elem"]) not in HALF or not able(base):
            continue
        counts = [count for w, loops in mine if (count := _count(g, w, loops, axes)) is not None]
        able_all = all(w.kind == "atomic_add" and _again(w) for w, _ in mine)
        if not able_all or len(counts) < len(mine):
            continue
        one = Scattered(base.attrs["name"], reduce(g.add, counts), [], [])
        cleared = {w: _cleared(g, w) for w, _ in mine}
        rounded = {w: _rounded(g, w, one) for w, _ in mine}
        one.cleared = picked(reverse.effects, cleared.get)
        one.rounded = picked(reverse.effects, rounded.get)
        made.append(one)
    return made


def _again(write: GradWrite) -> bool:
    """Whether an address is cheap to compute once more, and the same then."""
    conds = [region.cond for region in write.region.chain() if region.cond is not None]
    counted = all(region.kind != "while" for region in write.region.chain())
    return counted and is_straight(write.offset, write.mask, *conds)


def _count(g: Graph, write: GradWrite, loops: tuple[For, ...], axes: list[int]) -> Node | None:
    """How many elements a write reaches at most; None where the host does not know it."""
    count = g.product(write.offset.shape)
    for axis in axes:
        count = g.mul(count, g.npid(axis))
    for loop in loops:
        trips = trip_count(g, loop) if loop.region.bounds is not None else None
        if trips is None or trips.op == "longest":
            return None
        count = g.mul(count, trips)
    return count


def _cleared(g: Graph, write: GradWrite) -> GradWrite:
    zeros = g.zeros(write.offset.shape, "float32")
    return replace(write, value=zeros, kind="store", advice="")


def _rounded(g: Graph, write: GradWrite, one: Scattered) -> GradWrite:
    sums = g.scratch(one.sums, "float32")
    masked = [] if write.mask is None else [write.mask, g.const(0.0, "float32")]
    attrs = {"other": write.mask is not None, "buffer": True}
    with g.at(write.region):
        value = g.make("load", (sums, write.offset, *masked), attrs, "float32", write.offset.shape)
    return replace(write, value=value, kind="store", advice="")

"""The taps of a window that reach an index at all: with a stride of s, every s-th of them.

    for i in range(k):                              at, first = (y + pad) // s, (y + pad) % s
        o = (y + pad - i) // s                      for nth in range(tl.cdiv(k, s)):
        mask = (y + pad - i) % s == 0 ...               o, i = at - nth, first + nth * s

An index divides once, and not for each tap; and the loop is s times shorter. Lanes then have different taps
in one step. So it is done where a value asks the tap for numbers alone: a load of each tap, as of a weight,
would be one of each lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.nodes import GradWrite, Node, Region, nodes_in, operands, reachable
from ..ir.simplify import is_number, is_zero
from ..prove.affine import Monomial
from ..prove.positions import Entry

SHARED = ("load", "dot", "reduce", "scan", "gather")  # what is made for a block at once


@dataclass
class Steps:
    """The loop over the taps of one window that fit."""

    region: Region
    taps: Node  # how many there are in all
    stride: Node

    def at(self, g: Graph, number: Node, ask: Callable[[Node, str, Node], None]) -> tuple[Node, Node]:
        """The position and the tap of a step, with position * stride + tap = number."""
        nth = self.region.iv
        assert nth is not None
        ask(number, ">=", g.const(0))
        digit = g.sub(g.make("floordiv", (number, self.stride)), nth)
        tap = g.add(g.make("mod", (number, self.stride)), g.mul(nth, self.stride))
        ask(digit, ">=", g.const(0))
        ask(tap, "<", self.taps)
        return digit, tap


def find(
    g: Graph, write: GradWrite, strides: dict[Entry, Monomial], node: Callable[[Monomial], Node]
) -> dict[Entry, Steps]:
    """The taps, each the only one of its window, whose loops can be walked so."""
    wanted = {tap.var.region: tap for tap, stride in strides.items() if _able(write, tap, stride)}
    found: dict[Entry, Steps] = {}
    regions: dict[Region, Region] = {}
    for region in reversed(list(write.region.chain())):
        if region.kind == "top":
            continue
        if region not in wanted:
            if regions:  # something between the loops may hang on the taps
                return {}
            continue
        tap = wanted[region]
        stride = node(strides[tap])
        assert region.bounds is not None and region.parent is not None and region.iv is not None
        with g.at(regions.get(region.parent, region.parent)):
            count = g.make("cdiv", (region.bounds[1], stride))
            new = regions[region] = g.loop_region(g.const(0), count, g.one, "range", region.line)
        assert new.iv is not None
        new.iv.hint = new.iv.hint or f"nth_{region.iv.hint or 'tap'}"
        found[tap] = Steps(new, region.bounds[1], stride)
    return found


def _able(write: GradWrite, tap: Entry, stride: Monomial) -> bool:
    """Whether a tap is the number of a loop's step, and a value needs it for no more than a number."""
    region = tap.var.region
    if tap.position is not None or len(tap.terms) > 1 or tap.multiplier != (1, ()) or stride == (1, ()):
        return False
    if region is None or region.bounds is None or tap.terms[tap.var] != (1, ()):
        return False
    first, end, step = region.bounds
    if not is_zero(first) or not is_number(step, 1) or end.home.depth:
        return False

    def parts(item: object) -> list:  # what a loop ends with is kept
        return [] if isinstance(item, Node) and item.op == "loopout" else operands(item)

    shared = [n for n in reachable([write.value], parts) if isinstance(n, Node) and n.op in SHARED]
    return all(region.iv not in set(nodes_in(n.args)) for n in shared)

"""What the reverse sweep needs of a block that a loop carries, where that is a few numbers.

    for j in range(k):                                   tape: winner and the maximum, two numbers a step
        winner = tl.argmax(left, axis=0)
        total += tl.exp(tl.max(left, axis=0) - top)
        left = tl.where(lanes == winner, -inf, left)

Undoing a step takes the block as it was before it, but all that it asks of it are sums, maxima and places
over its lanes. These are taped, and the block is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.nodes import For, Node, operands

MOST = 4  # numbers for one loop: more are no smaller than the block, or than what it takes to read them


def find(loop: For, roots: Iterable[object], carried: set[Node]) -> list[Node]:
    """What of `carried` (phis of the loop that `loop` undoes) is all that `roots` need: values of fewer
    axes, made in a step without its adjoints; none where they need more, or too many."""
    search = _Search(loop, carried)
    whole = all(search.visit(root) for root in roots)
    return list(search.found) if whole and len(search.found) <= MOST else []


class _Search:
    def __init__(self, loop: For, carried: set[Node]) -> None:
        self.loop, self.carried = loop, carried
        self.axes = min(len(phi.shape) for phi in carried)
        self.found: dict[Node, None] = {}
        self.hangs: dict[object, bool] = {}
        self.seen: dict[object, bool] = {}

    def visit(self, item: object) -> bool:
        """Whether all of `carried` that an item hangs on comes to it through what was found."""
        if item not in self.seen:
            self.seen[item] = not self._hangs_on(item) or self._is_narrow(item) or self._parts_are(item)
        return self.seen[item]

    def _is_narrow(self, item: object) -> bool:
        if not isinstance(item, Node) or item.op not in ("reduce", "argreduce"):
            return False
        if item.upstream or len(item.shape) >= self.axes:
            return False
        self.found[item] = None
        return True

    def _parts_are(self, item: object) -> bool:
        """Loops and branches inside the loop are not looked into."""
        if isinstance(item, Node) and (item in self.carried or item.op in ("loopout", "ifout")):
            return False
        return not isinstance(item, For) and all(self.visit(part) for part in self._inside(item))

    def _hangs_on(self, item: object) -> bool:
        if item not in self.hangs:
            self.hangs[item] = False  # of a loop in the graph: what hangs on itself alone
            self.hangs[item] = item in self.carried or any(map(self._hangs_on, self._inside(item)))
        return self.hangs[item]

    def _inside(self, item: object) -> list:
        """The parts of an item that vary in the loop; carries of the forward are where a search ends."""
        if item in self.carried:
            return []
        region = self.loop.region
        return [p for p in operands(item) if not isinstance(p, Node) or p.home.inside(region)]

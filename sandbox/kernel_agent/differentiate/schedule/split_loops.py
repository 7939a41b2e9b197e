"""Loops of products whose steps go without masks where a tile lies wholly inside.

    for start in range(0, end, BLOCK_N):      for start in range(0, whole_end, BLOCK_N):
        visible = cols < N                        total = step(start, total, ..., MASKED=False)
        if CAUSAL:                            for start in range(whole_end, end, BLOCK_N):
            visible &= cols <= rows               total = step(start, total, ..., MASKED=True)
        total += ...

Of a causal attention's tiles only those on the diagonal and the last ones have lanes outside. For all others
the comparisons are true, and what only asks them is gone: by hand that took an eighth to a third of the time
of the kernels of its backward on an H200. The steps and their order stay, so that each sum is the same.

Which steps those are says `whole_steps`: those from the last of the steps that fail a condition that holds
from some on, to the first that fails one that holds up to some. Both are counted from the loop's first step
by divisions of what is not negative, as these round to zero in one place and down in another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..ir.folding import concrete
from ..ir.graph import Graph
from ..ir.nodes import Node
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import Kernel
from .whole_steps import END, FORMED, Condition, Flags, Found, Sum, plus, times

FLAG = "MASKED"
LEAST = 2  # whole steps of a program that are worth a loop of their own
REASON = "steps whose tiles lie wholly inside go without masks"


@dataclass(eq=False)
class Split:
    """How a loop is walked: by ranges one after the other, each of masked steps or of whole ones, of which
    `flag` tells its body. There, `answered` are the comparisons that whole steps leave out."""

    flag: Node
    parts: list[tuple[Node, Node, bool]]
    answered: set[Node]

    @property
    def points(self) -> list[Node]:
        return [node for start, end, _ in self.parts for node in (start, end)]


def split(kernel: Kernel, found: Found) -> None:
    """Have a loop walk its whole steps apart."""
    g, loop, name = kernel.graph, found.steps.loop, FLAG
    while name in kernel.args:
        name += "_"
    flag = g.intern("constexpr", (), {"name": name, "value": True, "global": True}, "int1", ())
    before, g.reverse = (g.reverse, g.line), False  # what has a name then gets a statement
    with g.at(loop.outer):
        parts = _Points(g, found, kernel.tl).parts()
    g.reverse, g.line = before
    _rewrite(g, found, flag)
    inside = {n for n in found.answered if n.home.inside(loop.region)}
    loop.split = Split(flag, parts, inside)


def _rewrite(g: Graph, found: Found, flag: Node) -> None:
    """Have the body ask comparisons where it is masked alone."""
    loop, region = found.steps.loop, found.steps.region
    asked: dict[Node, Node] = {}
    for compare in found.answered:
        home = compare.home if compare.home.inside(region) else region
        args = (flag, compare, g.const(True, "int1", compare.shape))
        asked[compare] = g.fresh("select", {}, "int1", compare.shape, home, args)
        asked[compare].hint, asked[compare].line = compare.hint or "inside", compare.line

    def outside(mask: Node) -> Node:
        if mask not in asked and mask.op in FORMED and mask.dtype == "int1":
            args = [outside(arg) for arg in mask.args]
            if args != list(mask.args):
                with g.at(region):
                    asked[mask] = g.again(mask, args)
        return asked.get(mask, mask)

    def replaced(node: Node) -> Node | None:
        return asked.get(node) if node.home.inside(region) else outside(node)

    made = Rewriter(g, replaced)
    for carry in loop.carries:
        carry.next = carry.next and made.node(carry.next)
    loop.effects = made.effects(loop.effects)


# split points


class _Points:
    """Makes the nodes of a loop's split points; `tl`: the kernel's name for Triton's language."""

    def __init__(self, g: Graph, found: Found, tl: str) -> None:
        self.g, self.found, self.steps, self.tl = g, found, found.steps, tl
        start, step = self.steps.of(self.steps.lo), self.steps.positive(self.steps.step)
        assert start is not None and step is not None and self.steps.region.iv is not None
        self.before: frozenset[Node] = frozenset()  # numbers that have 32 bits, or no step is whole
        self.start, self.step, self.dtype = start.base, step, self.steps.region.iv.dtype

    def parts(self) -> list[tuple[Node, Node, bool]]:
        """The ranges, but for those that are empty whatever the call."""
        g, lo, hi = self.g, self.steps.lo, self.steps.hi
        start, end = lo, hi
        ordered = sorted(self.found.conditions, key=lambda one: len(one.flags))
        for one in (one for one in ordered if one.sign < 0):
            start = self._chosen(one.flags, partial(self._later, one, start), start, "whole_start")
        for one in (one for one in ordered if one.sign > 0):
            end = self._chosen(one.flags, partial(self._earlier, one, end), end, "whole_end")
        if start is not lo and end is not hi:
            end = _named(g.make("maximum", (end, start), {}, self.dtype), "whole_end")
        for one in (one for one in ordered if not one.sign):
            end = self._chosen(one.flags, partial(self._unless, one, start, end), end, "whole_end")
        before, after = [(lo, start, True)], [(end, hi, True)]
        return before * (start is not lo) + [(start, end, False)] + after * (end is not hi)

    def _chosen(self, flags: Flags, asked: Callable[[], Node], other: Node, hint: str) -> Node:
        """A point in calls with these flags, and what it is in others."""
        if not flags:
            return _named(asked(), hint)
        (cond, answer), *more = flags
        stmt, here = self.g.fork(cond, True), self.g.here
        with self.g.at(stmt.then if answer else stmt.other):
            inside = self._chosen(tuple(more), asked, other, hint)
        then, no = (inside, other) if answer else (other, inside)
        point = self.g.merged(stmt, then, no, self.steps.region.iv, here)  # type: ignore[arg-type]
        point.hint = hint
        return point

    def _unless(self, one: Condition, start: Node, end: Node) -> Node:
        """The end of the whole steps, of which there are none where a condition does not hold."""
        ends = self.g.make("where", (self._inside(one), end, start), {}, self.dtype, ())
        return self._known(one, self.before, ends, start)

    def _known(self, one: Condition, known: frozenset[Node], point: Node, other: Node) -> Node:
        """A point where what a condition is made of has 32 bits, and where there are no whole steps if not;
        `known`: that there are none if these have more."""
        g, fits = self.g, None
        for number in sorted({*one.numbers, self.steps.lo, self.steps.hi} - known, key=lambda n: n.id):
            if not self.steps.is_narrow(number):
                fits = g.both(fits, g.compare("<=", number, g.const(END - 1)))
                fits = g.both(fits, g.compare(">=", number, g.const(-END)))
        if fits is None:
            return point
        return g.make("where", (_named(fits, "fits"), point, other), {}, self.dtype, ())

    def _later(self, one: Condition, start: Node) -> Node:
        """The first step from `start` on in which a condition holds that holds from some on."""
        up = {key: -factor for key, factor in one.steps.items()}
        missing = plus(one.base, times(up, self.start), -1)
        args = self._natural(missing, True), self._number(times(up, self.step), False)
        point = self._at(_named(self.g.make("cdiv", args, {}, "int64", ()), "skipped"))
        if start is not self.steps.lo:
            point = self.g.make("maximum", (point, start))
        point = self._cast(self.g.make("minimum", (point, self.steps.hi)))
        return self._known(one, frozenset(), point, self.steps.hi)

    def _earlier(self, one: Condition, end: Node) -> Node:
        """The first step, or `end`, in which a condition does not hold that holds up to some."""
        each = times(one.steps, self.step)
        total = plus(plus(each, one.base, -1), times(one.steps, self.start), -1)
        wide = not (is_zero(self.steps.lo) and self._is_narrow(total) and self._is_narrow(each))
        args = self._natural(total, wide), self._number(each, False)
        count = self.g.make("floordiv", args, {}, "int64" if wide else "int32", ())
        point = self._at(_named(count, "inside") if wide else count)
        narrow = self.none is self.steps.lo and self.steps.is_narrow(self.steps.lo)
        known = self.before & {self.steps.hi} if narrow else frozenset[Node]()
        if not one.flags:
            self.before |= one.numbers | {self.steps.lo, self.steps.hi}
        return self._known(one, known, self._cast(self.g.make("minimum", (point, end))), self.none)

    @property
    def none(self) -> Node:
        """An end of whole steps of which there are none: not behind that of a loop without steps, from which
        masked ones would be walked to a later start."""
        if not any(one.sign < 0 for one in self.found.conditions):
            return self.steps.lo
        return self.g.make("minimum", (self.steps.lo, self.steps.hi))

    def _inside(self, one: Condition) -> Node:
        """A condition that is the same in all steps."""
        left = {key: factor for key, factor in one.base.items() if factor > 0}
        right = {key: -factor for key, factor in one.base.items() if factor < 0}
        wide = not (self._is_narrow(left) and self._is_narrow(right))
        return self.g.compare("<=", self._number(left, wide), self._number(right, wide))

    # numbers

    def _at(self, count: Node) -> Node:
        """The value of the loop's variable after so many steps."""
        return self.g.add(self.steps.lo, self.g.mul(count, self.steps.step))

    def _cast(self, point: Node) -> Node:
        return point if point.dtype == self.dtype else self.g.cast(point, self.dtype)

    def _natural(self, total: Sum, wide: bool) -> Node:
        """A sum, or 0 if it is less: what is divided is not negative."""
        number = self._number(total, wide)
        if self.steps.range(total)[0] >= 0:
            return number
        return self.g.make("maximum", (number, self.g.const(0)))

    def _number(self, total: Sum, wide: bool) -> Node:
        """A sum, with what is added before what is taken away; `wide`: in 64 bits."""
        number: Node | None = None
        for key, factor in _ordered(total):
            term = self.g.product([*(self.g.const(abs(factor)),), *self._factors(key, wide)])
            number = self.g.signed(number, term, 1 if factor > 0 else -1)
        return self.g.const(0) if number is None else number

    def _factors(self, key: tuple[Node, ...], wide: bool) -> list[Node]:
        """Those of a product, one with 64 bits; sizes of blocks are Python's."""
        numbers = [node for node in key if node not in self.steps.sizes and node.op != "const"]
        first = next((node for node in numbers if node.op != "param"), next(iter(numbers), None))
        return [self._widened(node) if wide and node is first else node for node in key]

    def _widened(self, node: Node) -> Node:
        if node.dtype == "int64":
            return node
        if _is_tensor(node):
            return self.g.cast(node, "int64")
        text = f"{self.tl}.full([], {{}}, {self.tl}.int64)"
        return self.g.make("user", (node,), {"text": text}, "int64", ())

    def _is_narrow(self, total: Sum) -> bool:
        """Whether no part of a sum needs more than 32 bits."""
        part: Sum = {}
        for key, factor in _ordered(total):
            part = plus(part, {key: factor})
            ends = *self.steps.range({key: abs(factor)}), *self.steps.range(part)
            if min(ends) < -END or max(ends) >= END:
                return False
        return True


def _is_tensor(node: Node) -> bool:
    """Whether a number has methods, also where it is known when the kernel is compiled or run on the CPU."""
    if node.op in ("pid", "npid", "load", "minimum", "maximum"):
        return True
    return node.op in ("add", "sub", "mul", "floordiv", "mod") and any(map(_is_tensor, node.args))


def _ordered(total: Sum) -> list[tuple[tuple[Node, ...], int]]:
    """What is added, then what is taken away; constants last."""
    return sorted(total.items(), key=lambda one: (one[1] < 0, not one[0]))


def _named(node: Node, hint: str) -> Node:
    node.hint = node.hint or hint
    return node


# what it is worth


def is_worth(found: Found, known: dict[int, Any]) -> bool:
    """Whether a program has whole steps enough, with these values by the ids of nodes; also where they are
    not known, as data says how many there are."""
    steps = found.steps
    values = Values(known)
    asked = [one for one in found.conditions if all(values.of(cond) == answer for cond, answer in one.flags)]
    lo, hi, step = (values.of(node) for node in (steps.lo, steps.hi, steps.step))
    walked = None if None in (lo, hi, step) else range(lo, hi, step)
    first, last = 0, 0 if walked is None else len(walked)
    for one in asked:
        base, each = values.sum(one.base), values.sum(one.steps)
        if walked is None or base is None or each is None:
            return values.loaded
        if each == 0:
            last = last if base <= 0 else 0
        elif each < 0:
            first = max(first, -(-(base + each * lo) // (-each * step)))
        else:
            last = min(last, -(base + each * lo) // (each * step) + 1)
    return last - first >= LEAST


class Values:
    """Numbers in a launch; `loaded`: whether one that was asked for is data."""

    def __init__(self, known: dict[int, Any]) -> None:
        self.known, self.loaded = dict(known), False

    def sum(self, total: Sum) -> int | None:
        result = 0
        for key, factor in total.items():
            for node in key:
                value = self.of(node)
                if type(value) is not int:
                    return None
                factor *= value
            result += factor
        return result

    def of(self, node: Node) -> Any:
        if node.id in self.known:
            return self.known[node.id]
        if node.op == "load":
            self.loaded = True
        if node.op == "ifout":
            cond = self.of(node.args[0])
            side = None if cond is None else node.attrs["then" if cond else "other"]
            self.known[node.id] = None if side is None else self.of(side)
            return self.known[node.id]
        for arg in node.args:
            self.of(arg)
        return concrete(node, self.known)

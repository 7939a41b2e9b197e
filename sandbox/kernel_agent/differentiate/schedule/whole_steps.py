"""In which steps of a loop all lanes of a tile lie inside.

A comparison of indices, each a number and lanes, is true in all lanes where it is for the extreme ones: a
condition `base + steps * i <= 0` of the loop's variable i, which holds up to some step or from one on. In the
steps between, all such comparisons are true.

What the conditions are made of has 32 bits, or that is asked too, and they are computed so that nothing
wraps. An index that is compared may wrap where they do not: that it does not is proven, or one more
condition.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import prod
from typing import Any

from ..ir.graph import Graph
from ..ir.nodes import For, Node, nodes_in, operands, reachable, sides
from ..ir.nonnegative import natural
from ..ir.simplify import is_zero
from ..ir.values import carried, is_static

BITS = {"int32": 31, "int64": 63}
LARGEST = 2**20  # lanes of a block: Triton has no more
END = 2**31  # of numbers that have 32 bits
ROOM = 2**62  # that no sum may come near to
FORMED = ("and", "expand", "broadcast")  # a mask of others

Sum = dict[tuple[Node, ...], int]  # of products of numbers, each with its factor; () is 1
Flags = tuple[tuple[Node, bool], ...]  # conditions known when the kernel is compiled, and their answers
Bounds = tuple[int, int]


def plus(one: Sum, other: Sum, sign: int = 1) -> Sum:
    total = {key: one.get(key, 0) + sign * other.get(key, 0) for key in (*one, *other)}
    return {key: factor for key, factor in total.items() if factor}


def times(one: Sum, other: Sum) -> Sum:
    total: Sum = {}
    for (left, a), (right, b) in product(one.items(), other.items()):
        total = plus(total, {tuple(sorted((*left, *right), key=lambda n: n.id)): a * b})
    return total


@dataclass
class Index:
    """What an index is in step i: base + steps * i, and lanes, each range so many times."""

    base: Sum = field(default_factory=dict)
    steps: Sum = field(default_factory=dict)
    lanes: list[tuple[int, Node]] = field(default_factory=list)  # with how many there are

    def extreme(self, most: bool) -> tuple[Sum, Sum]:
        """The largest of all lanes, or the least: base and steps."""
        base = self.base
        for factor, size in self.lanes:
            if (factor > 0) is most:
                count: Sum = {(): size.value} if size.op == "const" else {(size,): 1}
                base = plus(base, plus(count, {(): 1}, -1), factor)
        return base, self.steps

    def added(self, other: Index, sign: int) -> Index:
        lanes = [*self.lanes, *((sign * factor, size) for factor, size in other.lanes)]
        return Index(plus(self.base, other.base, sign), plus(self.steps, other.steps, sign), lanes)

    def times(self, number: Sum) -> Index | None:
        if self.lanes and number.keys() - {()}:
            return None
        lanes = [(factor * number.get((), 0), size) for factor, size in self.lanes]
        return Index(times(self.base, number), times(self.steps, number), [one for one in lanes if one[0]])


@dataclass
class Condition:
    """base + steps * i <= 0, asked where flags have these answers. One product with i at most, of numbers
    above zero: by its factor's sign it holds up to some step or from one on; without one, in all or none."""

    base: Sum
    steps: Sum
    flags: Flags
    numbers: frozenset[Node]  # of which it is known only if they have no more than 32 bits

    @property
    def sign(self) -> int:
        return next(iter(self.steps.values()), 0)

    def joined(self, others: list[Condition]) -> list[Condition]:
        """This and others, once."""
        for at, other in enumerate(others):
            if (self.base, self.steps, self.flags) == (other.base, other.steps, other.flags):
                both = replace(other, numbers=self.numbers | other.numbers)
                return [*others[:at], both, *others[at + 1 :]]
        return [*others, self]


@dataclass
class Found:
    """A loop that may be split: the comparisons that are true in whole steps, and which those are."""

    steps: Steps
    answered: list[Node]
    conditions: list[Condition]


def find(g: Graph, effects: list) -> list[Found]:
    """The loops of some effects that may be split, of those that lie in each other the innermost that may."""
    loops = [item for item in reachable(effects) if isinstance(item, For)]
    found: dict[For, Found] = {}
    for loop in sorted(loops, key=lambda loop: -loop.region.depth):
        one = Steps(g, loop).find() if _is_candidate(loop, found) else None
        if one is not None:
            found[loop] = one
    return list(found.values())


def _is_candidate(loop: For, found: Container[For]) -> bool:
    """Whether a loop has a product, is walked in order, and has none in it that is split."""
    region = loop.region
    if region.bounds is None or region.iv is None or region.call.endswith("static_range"):
        return False
    if loop.order == "reverse" or any(map(carried, region.bounds)):
        return False
    if any(n.shape or n.dtype not in BITS for n in region.bounds):
        return False
    inside = list(body(loop))
    loops = [loop, *(item for item in inside if isinstance(item, For))]
    if any(one.tape or one.provides or one.cond is not None or one.split is not None for one in loops):
        return False
    ops = {item.op for item in inside if isinstance(item, Node)}
    return "dot" in ops and "user" not in ops and not any(one in found for one in loops)


def body(loop: For, outside: set[Node] | None = None) -> Iterator[Any]:
    """The values that a loop makes in its steps, and loops in it; `outside` is given what those are made of
    that stands outside."""

    def inside(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if not isinstance(item, Node) or item.home.inside(loop.region):
                yield item
            elif outside is not None:
                outside.add(item)

    roots = inside([*(c.next for c in loop.carries if c.next is not None), *loop.effects])
    for item in reachable(roots, lambda item: inside(operands(item))):
        if isinstance(item, Node | For):
            yield item


def formed(mask: Node) -> Iterator[Node]:
    """The comparisons that a mask outside of a loop is formed of."""
    if mask.op in FORMED and mask.dtype == "int1":
        yield from chain.from_iterable(map(formed, mask.args))
    elif mask.op == "compare" and mask.shape:
        yield mask


class Steps:
    """What is known of comparisons in the steps of a loop."""

    def __init__(self, g: Graph, loop: For) -> None:
        self.g, self.loop, self.region = g, loop, loop.region
        assert loop.region.bounds is not None
        self.lo, self.hi, self.step = loop.region.bounds
        ranges = [n for n in g.table.values() if n.op == "arange" and n.home.parent is None]
        self.sizes = {n.args[1] for n in ranges}
        self.sides: list[Index] = []  # of a comparison, and what is widened in them

    def find(self) -> Found | None:
        """None where the loop stays as it is."""
        start = self.of(self.lo)
        if start is None or self.positive(self.step) is None:
            return None
        answered: list[Node] = []
        conditions: list[Condition] = []
        asked: list[Condition] = []
        for compare in self._compared():
            self.sides = []
            flags = self._flags(compare)
            one = None if flags is None else self._holds(compare, flags)
            if one is not None and self._is_linear(one):
                answered.append(compare)
                conditions = one.joined(conditions)
                asked += [c for index in self.sides for c in self._fits(index, one)]
        if not any(one.steps for one in conditions):
            return None
        proven = list(conditions)
        for one in asked:
            if not self.follows(one, None) and not any(self.follows(one, other) for other in proven):
                conditions = one.joined(conditions)
        known = all(self._is_linear(one) and self._is_small(one, start.base) for one in conditions)
        return Found(self, answered, conditions) if known else None

    # comparisons

    def _compared(self) -> list[Node]:
        """Those of tiles whose answers steps use."""
        outside: set[Node] = set()
        every = [n for n in body(self.loop, outside) if isinstance(n, Node)]
        inside = [n for n in every if n.op == "compare" and n.shape]
        return sorted({*inside, *chain.from_iterable(map(formed, outside))}, key=lambda n: n.id)

    def _flags(self, compare: Node) -> Flags | None:
        """The branches of a step in which it stands; None where one is taken or not while the kernel runs."""
        flags: list[tuple[Node, bool]] = []
        for region in compare.home.chain() if compare.home.inside(self.region) else ():
            if region is self.region:
                break
            if region.kind == "for":
                continue
            if region.cond is None or not is_static(region.cond) or region.cond.home.inside(self.region):
                return None
            flags.append((region.cond, region.positive))
        return tuple(flags[::-1])

    def _holds(self, compare: Node, flags: Flags) -> Condition | None:
        """In which steps it is true in all lanes, if none of `sides` wraps."""
        ordered = compare.args if compare.attrs["cmp"] in ("<", "<=") else compare.args[::-1]
        if compare.attrs["cmp"] not in ("<", "<=", ">", ">="):
            return None
        least, most = (self.of(side) for side in ordered)
        if least is None or most is None or not (least.lanes or most.lanes):
            return None
        self.sides += [least, most]
        (base, steps), (other, others) = least.extreme(True), most.extreme(False)
        base, steps = plus(base, other, -1), plus(steps, others, -1)
        if compare.attrs["cmp"] in ("<", ">"):
            base = plus(base, {(): 1})
        sums = [one for side in self.sides for one in (side.base, side.steps)]
        numbers = frozenset(n for one in sums for key in one for n in key)
        if not steps and not any(n.op in ("pid", "iv") for n in nodes_in(numbers)):
            return None  # the same in all programs: all steps may be masked for the sake of one axis
        return Condition(base, steps, flags, frozenset(n for n in numbers if not self.is_narrow(n)))

    def _is_linear(self, one: Condition) -> bool:
        above = all(self.positive(node) is not None for key in one.steps for node in key)
        return above and len(one.steps) <= 1

    # indices

    def of(self, node: Node) -> Index | None:
        """None where it is not known how it hangs on the step."""
        if node.dtype not in BITS:
            return None
        if node is self.region.iv:
            return Index(steps={(): 1})
        if not node.shape and not node.home.inside(self.region):
            return self._number(node)
        if node.op in ("expand", "broadcast", "full"):
            return self.of(node.args[0])
        if node.op == "arange":
            return Index(lanes=[(1, node.args[1])]) if is_zero(node.args[0]) else None
        return self._computed(node)

    def _number(self, node: Node) -> Index | None:
        """A number that is the same in all steps: as the program has it, whatever it has wrapped to."""
        if node.op == "const":
            return Index(base={(): node.value} if node.value else {})
        if node.op == "cast" and node.args[0].dtype == "int32" and not node.args[0].weak:
            return self._number(node.args[0])
        return Index(base={(node,): 1})

    def _computed(self, node: Node) -> Index | None:
        if node.op not in ("add", "sub", "mul", "neg", "cast"):
            return None
        args = [self.of(arg) for arg in node.args]
        if None in args:
            return None
        for arg, index in zip(node.args, args, strict=True):
            if not arg.weak and BITS[arg.dtype] < BITS[node.dtype]:
                self.sides.append(index)  # type: ignore[arg-type]
        left, right = args[0], args[-1]
        assert left is not None and right is not None
        if node.op == "cast":
            return left
        if node.op == "neg":
            return Index().added(left, -1)
        if node.op in ("add", "sub"):
            return left.added(right, 1 if node.op == "add" else -1)
        for one, other in ((left, right), (right, left)):
            if not other.lanes and not other.steps:
                return one.times(other.base)
        return None

    def positive(self, node: Node) -> Sum | None:
        """A number that is above zero in every call; None where that is not known."""
        if node.op == "const":
            return {(): node.value} if type(node.value) is int and node.value > 0 else None
        if node.op == "mul":
            left, right = map(self.positive, node.args)
            return None if left is None or right is None else times(left, right)
        return {(node,): 1} if node in self.sizes or node.op == "npid" else None

    # what does not wrap

    def is_narrow(self, node: Node) -> bool:
        """Whether a number has 32 bits in every call: a parameter, or an element of a table, may have
        more."""
        if node in self.sizes or node.op in ("const", "pid", "npid") or _counts_programs(node):
            return True
        if node.dtype != "int32":
            return False
        if node.op == "iv":
            return all(map(self.is_narrow, node.home.bounds or ()))
        if node.op == "ifout":
            return all(map(self.is_narrow, sides(node)))
        if node.op == "select":
            return all(map(self.is_narrow, node.args[1:]))
        ops = ("add", "sub", "mul", "neg", "floordiv", "mod", "cdiv", "minimum", "maximum", "cast")
        return node.op in ops and all(map(self.is_narrow, node.args))

    def _fits(self, index: Index, compared: Condition) -> list[Condition]:
        """That all lanes are in the range of 32 bits, if it takes that to be so."""
        if self._is_exact(index):
            return []
        (most, steps), (least, _) = index.extreme(True), index.extreme(False)
        above = replace(compared, base=plus(most, {(): 1 - END}), steps=steps)
        below = replace(compared, base=plus({(): -END}, least, -1), steps=plus({}, steps, -1))
        return [above, below]

    def _is_exact(self, index: Index) -> bool:
        """Whether an index is a number, or starts at a multiple of its lanes' number: that is a power of two,
        so no end of a type lies between them."""
        alone = [key[0] for key, factor in index.base.items() if len(key) == 1 and factor == 1]
        is_number = not index.steps and len(index.base) == len(alone) <= 1
        if not index.lanes:
            return is_number
        (factor, size), *more = index.lanes
        if more or factor != 1:
            return False
        if is_number:
            return all(is_multiple(node, size) for node in alone)
        return (
            not index.base
            and index.steps == {(): 1}
            and all(is_multiple(n, size) for n in (self.lo, self.step))
        )

    def follows(self, one: Condition, other: Condition | None) -> bool:
        """Whether a condition holds wherever another does; without one, everywhere."""
        if other is not None and not set(other.flags) <= set(one.flags):
            return False
        base = one.base if other is None else plus(one.base, other.base, -1)
        steps = one.steps if other is None else plus(one.steps, other.steps, -1)
        walked = (0 if _is_natural(self.lo) else -(2**63), 2**63 - 1)
        return self.range(base)[1] + _product([self.range(steps), walked])[1] <= 0

    def range(self, total: Sum) -> Bounds:
        """Between which numbers a sum lies, if what it is made of has 32 bits."""
        parts = [_product([(factor, factor), *map(self._of_type, key)]) for key, factor in total.items()]
        return sum(low for low, _ in parts), sum(high for _, high in parts)

    def _of_type(self, node: Node) -> Bounds:
        if node in self.sizes:
            return 1, LARGEST
        return 0 if node.op in ("pid", "npid") else -END, END - 1

    def _is_small(self, one: Condition, start: Sum) -> bool:
        """Whether what is computed of it stays in 64 bits, in whatever order."""
        each = times(one.steps, self.positive(self.step) or {})
        every = [*one.base.items(), *times(one.steps, start).items(), *each.items(), *start.items()]
        return sum(max(map(abs, self.range({key: factor}))) for key, factor in every) < ROOM


def _counts_programs(node: Node) -> bool:
    """Whether a number is one that the host passes of the forward's grid."""
    return node.op == "param" and "traced" not in node.attrs and node.attrs["name"].startswith("grid_")


def _is_natural(number: Node) -> bool:
    if number.op == "select":
        return all(map(_is_natural, number.args[1:]))
    return natural(number)


def _product(ranges: list[Bounds]) -> Bounds:
    ends = [prod(every) for every in product(*ranges)]
    return min(ends), max(ends)


def is_multiple(number: Node, size: Node) -> bool:
    """Whether a number is a multiple of a power of two, also after it has wrapped."""
    if number is size or is_zero(number):
        return True
    if number.op == "const" and size.op == "const":
        return bool(number.value % size.value == 0)
    if number.op in ("add", "sub", "neg"):
        return all(is_multiple(arg, size) for arg in number.args)
    if number.op == "cast":
        return number.args[0].dtype in BITS and is_multiple(number.args[0], size)
    return number.op == "mul" and any(is_multiple(arg, size) for arg in number.args)

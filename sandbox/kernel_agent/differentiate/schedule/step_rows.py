"""What each step of a loop adds to a row of a gradient is one product behind the loop.

    for i in reversed(range(n)):                             for i in reversed(range(n)):
        d_i = tl.sum(tl.where(j == i, d_x, 0), 0) / pivot        ...
        d_row = -tl.sum(d_i[None, :] * x, 1)
        atomic_add(d_l + i * n + j, d_row, j < i)            d_rows = -tl.dot(d_x, tl.trans(x))
        d_x = tl.where(j == i, d_i, d_x - d_i * row)         store(d_l + j[:, None] * n + j, d_rows, ...)

So go the adjoints of substitutions. It is done where a step leaves the vector in lanes of its own number, and
later ones leave those alone: the row of a step is one of the block that the loop ends with. What a step adds
to one element, a sum over such a row and one of `x`, is an element of a sum of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.kinds import LANEWISE
from ..ir.nodes import For, GradWrite, Node, Region, beneath, walk
from ..ir.simplify import is_number, is_zero
from ..ir.values import loop_out
from ..reverse.sweep import Reverse
from ..reverse.written_once import Lanes, spans
from . import kept_values

LEAST = 16  # elements that a product of blocks sums over on any GPU
WHOLE = ("add", "sub", "mul", "neg", "cast", "compare", "and")  # of which places and masks are made


def gather(reverse: Reverse) -> list[GradWrite]:
    """Take such writes out of loops that run backwards; those that stand behind the loops instead."""
    effects: list = []
    found: list[GradWrite] = []
    for effect in reverse.effects:
        effects.append(effect)
        if isinstance(effect, For) and effect.order == "reverse" and effect.source is not None:
            rows = next(_ended_rows(reverse.kernel.graph, effect, effect.source), None)
            new = [] if rows is None else rows.taken()
            effects += new
            found += new
    reverse.effects = effects
    return found


def _ended_rows(g: Graph, loop: For, source: For) -> Iterator[_Rows]:
    """The adjoints of a loop's carries that end with a row of each step, with the row as a step has it."""
    bounds = loop.region.bounds
    steady = bounds is not None and is_number(bounds[2], 1) and loop.outer is g.top
    for carry in source.carries if steady else ():
        lanes = Lanes.of(g, carry, source.region)
        if (
            lanes is None
            or (lanes.axis, lanes.rank) != (0, 2)
            or lanes.written.args[1] is not source.region.iv
        ):
            continue
        for k, adjoint in enumerate(loop.carries):
            if adjoint.phi.shape == carry.phi.shape and adjoint.next is not None:
                step = _Step(g, loop.region, lanes, adjoint.phi)
                kept, new = step.lanes_of(adjoint.next, 0, False), step.lanes_of(adjoint.next, 0, True)
                row = step.row(new)
                if kept is adjoint.phi and row is not None:
                    yield _Rows(g, loop, k, lanes, adjoint.phi, row)


@dataclass
class _Step:
    """What a step of a loop makes of a carry."""

    g: Graph
    region: Region
    lanes: Lanes
    phi: Node

    def lanes_of(self, node: Node, axis: int, now: bool) -> Node:
        """A value in the lanes along an axis that the step writes, or in those of the steps before it that
        the loop makes, which are later ones of the forward."""
        if axis >= len(node.shape) or not node.home.inside(self.region) or node is self.phi:
            return node
        if node.op == "where" and (axis == 0 and (sides := self.lanes.sides(node)) is not None):
            return self._like(self.lanes_of(sides[0 if now else 1], axis, now), node)
        if node.op == "where" and self.lanes.before_along(node.args[0], node.shape) == axis:
            return self._like(self.lanes_of(node.args[2], axis, now), node)
        if node.op == "load" and len(node.args) == 4:
            out = self.lanes.before_along(node.args[2], node.shape) == axis
            return self._like(node.args[3], node) if out else node
        if node.op == "expand":
            at = node.attrs["axis"]
            inner = node.args[0]
            return self._again(node, [self.lanes_of(inner, axis - (at < axis), now) if at != axis else inner])
        if node.op not in LANEWISE:
            return node
        return self._again(
            node, [self.lanes_of(a, axis, now) if spans(a, node, axis) else a for a in node.args]
        )

    def row(self, new: Node) -> Node | None:
        """The same in the one lane that the step writes, without that axis: of the carry, the row."""
        g = self.g
        if new is self.phi:
            with g.at(self.region):
                return g.reduce("sum", g.where(self.lanes.now, self.phi, g.number(0)), 0)
        if not new.shape:
            return new
        if new.op == "expand" and new.attrs["axis"] == 0 and len(new.shape) == 2:
            return new.args[0]
        args = [self.row(a) for a in new.args] if new.op in LANEWISE - {"expand", "broadcast"} else [None]
        known = [a for a in args if a is not None]
        if len(known) < len(args):
            return None
        with g.at(self.region):
            return g.make(new.op, known, new.attrs, new.dtype)

    def _like(self, value: Node, node: Node) -> Node:
        value = self.g.cast(value, node.dtype) if value.dtype != node.dtype and not value.weak else value
        return value if value.shape == node.shape else self.g.broadcast(value, node.shape)

    def _again(self, node: Node, args: list[Node]) -> Node:
        with self.g.at(max((n.home for n in (node, *args)), key=lambda region: region.depth)):
            return self.g.again(node, args)


@dataclass
class _Rows:
    """A loop that ends with a block of which each step made a row."""

    g: Graph
    loop: For
    k: int
    lanes: Lanes
    phi: Node
    row: Node  # as a step has it

    def taken(self) -> list[GradWrite]:
        """Such writes, as they are behind the loop; they leave it. All of a gradient do, or none."""
        bases: dict[Node, list[GradWrite]] = {}
        for write in walk(self.loop.effects):
            if isinstance(write, GradWrite):
                bases.setdefault(write.base, []).append(write)
        new: list[GradWrite] = []
        gone: set[int] = set()
        for writes in bases.values():
            behind = self._behind(writes)
            if behind is not None:
                new.append(behind)
                gone |= set(map(id, writes))
        self.loop.effects = [effect for effect in self.loop.effects if id(effect) not in gone]
        return new

    def _behind(self, writes: list[GradWrite]) -> GradWrite | None:
        """What all steps add to rows of one gradient, by a write each, or by one and one to the diagonal."""
        write, *others = sorted(writes, key=lambda one: -len(one.offset.shape))
        block = self._block(write.value)
        if any(one.kind != "atomic_add" or one.region is not self.loop.region for one in writes):
            return None
        if block is None or len(write.offset.shape) != 1 or write.mask is None or len(others) > 1:
            return None
        if others and not self._continues(others[0], write, block):
            return None
        with self.g.at(self.g.top):
            value, offset, mask = self._dot(block), self._of_all(write.offset), self._of_all(write.mask)
            if value is None or offset is None or mask is None:
                return None
            if others:
                mask = self.g.compare(mask.attrs["cmp"] + "=", *mask.args)
            mask = self.g.both(mask, self._inside())
            if (
                self.lanes.written.attrs["cmp"] == "<"
                and self.lanes.before_along(write.mask, write.offset.shape) == 0
            ):
                row = self.g.expand(self._lanes(), 0)  # these are lanes of steps then, too
                mask = self.g.both(mask, self.g.compare("<", row, self.loop.region.bounds[1]))  # type: ignore[index]
            mask, offset = (
                n if n.shape == value.shape else self.g.broadcast(n, value.shape) for n in (mask, offset)
            )
            value = self.g.neg(value) if write.value.op == "neg" else value
        value.upstream, value.line = True, write.line
        return GradWrite(write.base, offset, mask, value, self.g.top, write.line)

    def _continues(self, one: GradWrite, write: GradWrite, block: Node) -> bool:
        """Whether a step adds to one element what a row has in the lane of the step, where `write` leaves it
        to the lanes of earlier steps."""
        mask = write.mask
        if one.mask is not None or one.offset.shape or mask is None or mask.op != "compare":
            return False
        if self.lanes.before_along(mask, write.offset.shape) != 0 or self._diagonal(one.value) is not block:
            return False
        (lanes,) = [arg for arg in mask.args if arg.shape]
        with self.g.at(self.loop.region):
            return self._at_step(write.offset, lanes) is one.offset and (
                one.value.op == write.value.op == "neg"
            )

    def _at_step(self, node: Node, lanes: Node) -> Node | None:
        """A place in the lane of the step."""
        if node is lanes:
            return self.loop.region.iv
        if not node.shape:
            return node
        args = [self._at_step(arg, lanes) for arg in node.args] if node.op in WHOLE else [None]
        known = [arg for arg in args if arg is not None]
        return self.g.make(node.op, known, node.attrs, node.dtype) if len(known) == len(args) else None

    def _block(self, value: Node) -> Node | None:
        """The block that a row of a step is multiplied with and summed over, for its lanes."""
        value = value.args[0] if value.op == "neg" else value
        if value.op != "reduce" or value.attrs != {"fn": "sum", "axis": 1} or value.args[0].op != "mul":
            return None
        for row, block in (value.args[0].args, value.args[0].args[::-1]):
            if (
                row.op == "expand"
                and row.attrs["axis"] == 0
                and row.args[0] is self.row
                and self._stays(block)
            ):
                return block
        return None

    def _diagonal(self, value: Node) -> Node | None:
        """The same for one lane: a sum over all of a block that is zero but in the row of a step."""
        value = value.args[0] if value.op == "neg" else value
        whole, by = (value.args[0], value.args[1]) if value.op == "div" else (value, None)
        parts = whole.args[0] if _is_sum(whole) else whole
        if not _is_sum(parts) or parts.args[0].op != "mul" or len(parts.args[0].shape) != 2:
            return None
        with self.g.at(self.loop.region):
            g, picked = self.g, self.g.where(self.lanes.now, self.phi, self.g.number(0))
            alone = g.reduce("sum", picked, 0)
            scaled = alone if by is None else g.mul(alone, g.div(g.number(1), by))
        for one, block in (parts.args[0].args, parts.args[0].args[::-1]):
            if one is picked and self.row is scaled and self._stays(block):
                return block
        return None

    def _dot(self, block: Node) -> Node | None:
        """The rows that the loop ends with times those of a block."""
        g, (lanes, summed) = self.g, block.shape
        names = {n.attrs["name"] for n in (summed,) if n.op == "constexpr"}
        if names & g.sized or any((g.concrete(dim) or 0) < LEAST for dim in (lanes, summed)):
            return None
        turned = g.make("permute", (block,), {"order": (1, 0)}, block.dtype, (summed, lanes))
        return g.make("dot", (self._end(), turned), {"precision": "ieee"}, "float32", (lanes, lanes))

    def _stays(self, block: Node) -> bool:
        """Whether a block is the same in all steps."""
        return (
            block.shape == self.phi.shape
            and block.dtype == "float32"
            and not block.home.inside(self.loop.region)
        )

    def _end(self) -> Node:
        end = loop_out(self.g, self.loop, self.k)
        end.attrs[kept_values.ROWS] = True
        return end

    def _number(self) -> Node:
        """The numbers of the steps, each where its row is."""
        return self.g.expand(self._lanes(), 1)

    def _lanes(self) -> Node:
        return beneath(self.lanes.written.args[0], "expand", "broadcast", "cast")

    def _inside(self) -> Node:
        """Where there is a step of that number."""
        first, end, _ = self.loop.region.bounds  # type: ignore[misc]
        below = self.g.compare("<", self._number(), end)
        return below if is_zero(first) else self.g.both(self.g.compare(">=", self._number(), first), below)

    def _of_all(self, node: Node) -> Node | None:
        """A place, or a mask, of a step, for all of them along a new first axis; None where it is made of
        something else than sums and comparisons."""
        g = self.g
        if node is self.loop.region.iv:
            return g.cast(self._number(), node.dtype)
        if not node.home.inside(self.loop.region):
            return g.expand(node, 0) if node.shape else node
        args = [self._of_all(arg) for arg in node.args] if node.op in WHOLE else [None]
        known = [arg for arg in args if arg is not None]
        return g.make(node.op, known, node.attrs, node.dtype) if len(known) == len(args) else None


def _is_sum(node: Node) -> bool:
    return node.op == "reduce" and node.attrs["fn"] == "sum"

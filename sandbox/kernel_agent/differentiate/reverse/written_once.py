"""Loops whose steps each write the lanes of their own number alone, as a substitution does:

    for i in range(n): x = tl.where(j == i, ..., x)

Such a carry has no tape. Before a step, the lanes of earlier steps have what they have at the end, the others
what they began with. Much of a reverse loop needs neither, but what is there at the end: in a gradient that
is masked to the lanes of earlier steps (`mask=j < i`), and where the adjoint of what a step writes, which is
zero in all other lanes, is multiplied with just that. The step itself is then not computed again; and where
the forward has stored what the loop ends with, the loop is not walked again either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.kinds import LANEWISE
from ..ir.nodes import HALF, Carry, For, GradWrite, Node, Region, Store, beneath, real, walk
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import Kernel, loop_out
from ..prove import zeros
from ..prove.masks import comparisons
from .sweep import Reverse


def lanes_written(g: Graph, carry: Carry, region: Region) -> Node | None:
    """Of `where(lanes == step, value, carry)` in a loop that counts by one, or of a carry to which something
    is added in such lanes alone: the lanes that the steps before have written."""
    bounds, cond = region.bounds, _written_where(carry)
    if cond is None or bounds is None or bounds[2].op != "const" or bounds[2].value not in (1, -1):
        return None
    for lane, at in (cond.args, cond.args[::-1]):
        places = beneath(lane, "expand", "broadcast", "cast")
        alone = places.op == "arange" and places.args[0].op == "const" and places.args[0].value == 0
        way = _direction(at, region)
        if alone and way:
            return g.compare("<" if way == bounds[2].value else ">", lane, at)
    return None


def _direction(node: Node, region: Region) -> int:
    """1 for the number of a step plus what stays, -1 for what stays less that number, 0 for all else."""
    node = beneath(node, "expand", "broadcast", "cast")
    if node is region.iv:
        return 1
    if node.op not in ("add", "sub"):
        return 0
    one, other = (_direction(arg, region) for arg in node.args)
    stays = [not arg.home.inside(region) for arg in node.args]
    if one and stays[1]:
        return one
    return (other if node.op == "add" else -other) if stays[0] else 0


def _written_where(carry: Carry) -> Node | None:
    """The comparison for equality without which a step leaves a carry as it is."""
    chosen, phi = carry.next, carry.phi
    if chosen is None:
        return None
    kept = phi  # what lanes have that a step leaves alone
    if chosen.op in ("add", "sub") and phi in chosen.args[: 1 if chosen.op == "sub" else 2]:
        (chosen,) = [arg for arg in chosen.args if arg is not phi] or [chosen]
        kept = chosen.args[-1] if chosen.op == "where" else phi
        zero = beneath(kept, "full", "broadcast", "cast")
        if zero.op != "const" or zero.value != 0:
            return None
    if chosen.op != "where":
        return None
    cond, new, old = chosen.args
    if cond.op != "compare" or {"==": old, "!=": new}.get(cond.attrs["cmp"]) is not kept:
        return None
    return cond


def ended(reverse: Reverse, source: For, k: int) -> Node:
    """A carry after the loop: as the forward stored it, if it did and it is zero in all other lanes."""
    g, carry = reverse.kernel.graph, source.carries[k]
    last = loop_out(g, source, k)
    for store in (e for e in walk(reverse.kernel.effects) if isinstance(e, Store)):
        plain = store.base.op == "param" and kept_whole(reverse.kernel, store)
        if not plain or beneath(store.value, "cast") is not last or store.region is not source.outer:
            continue
        if not zeros.left_out(carry, store) or (reverse.exact and rounds(store.base, last)):
            continue
        reverse.rounded |= rounds(store.base, last)
        args = [store.base, store.offset, *([] if store.mask is None else [store.mask, g.number(0)])]
        with g.at(store.region):
            raw = g.make("load", args, {"other": store.mask is not None}, element(store), last.shape)
            read = g.cast(raw, carry.phi.dtype)
        read.hint = read.hint or carry.phi.hint
        name = store.base.attrs["name"]
        reason = f"`{carry.phi.hint}`: read back from `{name}` instead of recomputed"
        if all(line.reason != reason for line in reverse.report):
            reverse.say(store.line, "stored", "one store", reason)
        return read
    return last


def kept_whole(kernel: Kernel, store: Store) -> bool:
    """Whether a buffer holds what this statement stores after the launch: it is the only one."""
    others = [e for e in walk(kernel.effects) if isinstance(e, Store) and e.base is store.base]
    return len(others) == 1 and store.kind == "store" and store.base.attrs["name"] not in kernel.inplace


def rounds(base: Node, value: Node) -> bool:
    """Whether a tensor has fewer bits of a value than were computed."""
    return real(base.attrs["elem"]) in HALF and real(value.dtype) not in HALF


def element(store: Store) -> str:
    """The type of what a store's buffer holds."""
    return f"${store.base.attrs['elem']}:{store.base.attrs['name']}"


@dataclass(frozen=True)
class Lanes:
    """Which lanes of a carry a step writes: the comparisons that hold in them, and in those of earlier steps;
    the lanes lie along an axis."""

    now: Node
    written: Node
    axis: int
    rank: int

    @staticmethod
    def of(g: Graph, carry: Carry, region: Region) -> Lanes | None:
        """None for a carry that is written in another way."""
        now = _written_where(carry)
        with g.at(region):
            written = lanes_written(g, carry, region)
        if now is None or written is None:
            return None
        rank = len(carry.phi.shape)
        axis = lanes_along(written.args[0], range(rank))[1]
        return None if axis < 0 else Lanes(now, written, axis, rank)

    def sides(self, choice: Node) -> tuple[Node, Node] | None:
        """What a `where` has in the lanes that the step writes, and in all others; None for other choices."""
        if choice.op != "where" or choice.args[0] is not self.now or len(choice.shape) != self.rank:
            return None
        _, first, second = choice.args
        return (first, second) if self.now.attrs["cmp"] == "==" else (second, first)

    def before_along(self, cond: Node, shape: tuple) -> int | None:
        """The axis of a block along which a condition leaves lanes of earlier steps alone."""
        wanted, at = (beneath(arg, *_KEPT) for arg in self.written.args)
        for node, axes in comparisons(cond, len(shape)):
            for (lane, step), cmp in zip((node.args, node.args[::-1]), ("<>", "><"), strict=True):
                same = {cmp[0]: "<", cmp[1]: ">"}.get(node.attrs["cmp"]) == self.written.attrs["cmp"]
                if same and lane.shape and not step.shape and beneath(step, *_KEPT) is at:
                    found, axis = lanes_along(lane, axes)
                    if found is wanted:
                        return axis
        return None


def use_ends(reverse: Reverse) -> None:
    """In loops that run backwards, take such carries as they are at the end wherever that is the same."""
    g = reverse.kernel.graph
    loops = [e for e in walk(reverse.effects) if isinstance(e, For) and e.order == "reverse"]
    for loop, source in ((loop, loop.source) for loop in loops if loop.source is not None):
        stored = any(isinstance(e, Store) and e.region is source.region for e in source.effects)
        for k, carry in enumerate([] if stored else source.carries):
            lanes = Lanes.of(g, carry, source.region)
            if lanes is not None and carry.phi.active:
                _Ends(reverse, loop, source, k, lanes).run()


class _Ends:
    """One carry of one reverse loop."""

    def __init__(self, reverse: Reverse, loop: For, source: For, k: int, lanes: Lanes) -> None:
        self.reverse, self.loop, self.source, self.k, self.lanes = reverse, loop, source, k, lanes
        self.g, carry = reverse.kernel.graph, source.carries[k]
        chosen = carry.next
        assert chosen is not None
        self.phi, self.axis = carry.phi, lanes.axis
        sides = lanes.sides(chosen) or ()
        self.new = {chosen, *(side for side in sides if side is not carry.phi)}  # what a step writes
        self.made: dict[tuple[Node, int, bool], Node] = {}
        self.rewriter = Rewriter(self.g, self._replaced)

    def run(self) -> None:
        self.loop.effects = [self._effect(effect) for effect in self.loop.effects]
        for carry in self.loop.carries:
            carry.next = None if carry.next is None else self.rewriter.node(carry.next)

    def _effect(self, effect: object) -> object:
        effect = self.rewriter.effect(effect)
        if isinstance(effect, GradWrite) and effect.mask is not None:
            axis, rank = self.lanes.before_along(effect.mask, effect.offset.shape), len(effect.offset.shape)
            if axis is not None and len(effect.value.shape) == rank:
                effect.value = self._narrowed(effect.value, axis, before=True)
        return effect

    def _replaced(self, node: Node) -> Node | None:
        inner = next((region for region in node.home.chain() if region.is_loop), None)
        if inner is not self.source.region or node.op not in ("where", "mul"):
            return None
        new = self._product(node) if node.op == "mul" else self._choice(node)
        return None if new is node else new

    def _product(self, node: Node) -> Node | None:
        """What is zero but in lanes that the step writes, times what it writes there."""
        for at, (one, other) in enumerate((node.args, node.args[::-1])):
            if one.shape == other.shape == node.shape and self._now_alone(one) is not None:
                args = [self.rewriter.node(one), self._narrowed(other, self.axis, before=False)]
                return self._again(node, args[::-1] if at else args)
        return None

    def _choice(self, node: Node) -> Node | None:
        cond, *sides = node.args
        if (mine := self._now_alone(node)) is not None:
            args = [self._narrowed(side, self.axis, before=False) if side is mine else side for side in sides]
            return self._again(node, [cond, *args])
        if (axis := self.lanes.before_along(cond, node.shape)) is not None:
            first = self._narrowed(sides[0], axis, before=True) if spans(sides[0], node, axis) else sides[0]
            return self._again(node, [cond, *map(self.rewriter.node, (first, sides[1]))])
        return None

    def _again(self, node: Node, args: list[Node]) -> Node:
        with self.g.at(max((n.home for n in (node, *args)), key=lambda region: region.depth)):
            return self.g.again(node, args)

    def _now_alone(self, node: Node) -> Node | None:
        """What a value has in the lanes that the step writes, if it is zero in all others."""
        mine, other = self.lanes.sides(node) or (node, node)
        return mine if is_zero(other) and mine.shape == node.shape else None

    def _narrowed(self, node: Node, axis: int, before: bool) -> Node:
        """A value of which nobody asks but in some lanes: in those of earlier steps, along an axis, or in
        those that the step writes."""
        key = (node, axis, before)
        if key not in self.made:
            self.made[key] = self._of_lanes(node, axis, before)
        return self.made[key]

    def _of_lanes(self, node: Node, axis: int, before: bool) -> Node:
        wanted = node is self.phi if before else node in self.new
        if wanted and node.shape == self.phi.shape and axis == self.axis:
            return ended(self.reverse, self.source, self.k)
        if not node.home.inside(self.source.region):
            return self.rewriter.node(node)
        if node.op == "reduce":
            axis += node.attrs["axis"] <= axis
        elif node.op not in LANEWISE or node.op == "expand":
            return self.rewriter.node(node)
        args = [
            self._narrowed(a, axis, before) if spans(a, node, axis) else self.rewriter.node(a)
            for a in node.args
        ]
        return self._again(node, args)


_KEPT = ("expand", "broadcast", "cast")


def lanes_along(node: Node, axes: Sequence[int]) -> tuple[Node, int]:
    """The lanes of one axis that a block is made of, and which axis of a block that is."""
    axes = tuple(axes)[-len(node.shape) :]
    while node.op in _KEPT:
        if node.op == "expand":
            axes = tuple(axis for at, axis in enumerate(axes) if at != node.attrs["axis"])
        (node,) = node.args
    return node, axes[0] if len(axes) == 1 else -1


def spans(arg: Node, node: Node, axis: int) -> bool:
    """Whether an argument has a lane for each that a value has along an axis of the argument."""
    if node.op == "reduce":
        return True
    return len(arg.shape) == len(node.shape) and arg.shape[axis] is node.shape[axis]

"""A queue of tiles that programs walk, turned into tiles that anyone may have.

    tile = tl.program_id(0)                     for g in range(G):                  # all of them together
    for g in range(G):                              for m in range(rows(g)):
        last = first + rows(g) * columns                for n in range(columns):
        while tile < last:                                  body(g, m, n)
            local = tile - first
            body(g, local // columns, local % columns)
            tile += PROGRAMS
        first = last

Where as many programs start as each goes on by, and no group has less than no tiles, every program has those
tiles whose number leaves its own as a remainder: together they have each tile of each group once, in an order
that no sum hangs on. So neither the programs nor the state that they carry is left in a gradient's write, and
whoever owns a tile of the gradient sums over the others (`owner`). What a step carries to the next and is a
value of that step alone (`row_begin = row_end`) is that value one step before. A queue without groups is one
group; in a group tiles may be swizzled as programs may be.

How many programs there are is asked of the launch. That no group has less than no tiles is asked of the
tensors that bound groups, on the device: gradients are NaN where one decreases, and the host waits for
nothing. Where data says how many tiles of a gradient a group has, their owners walk a queue of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ..ir.graph import Graph, promote
from ..ir.nodes import (
    Carry,
    For,
    GradWrite,
    If,
    Node,
    Region,
    Store,
    beneath,
    mapped,
    nodes_in,
    operands,
    placed,
    reachable,
)
from ..ir.nonnegative import natural
from ..ir.simplify import is_number, is_zero
from ..ir.spelling import on_host
from ..ir.transplant import Graft
from ..ir.values import Kernel, quotient, step_of
from ..prove.affine import Affine, nonzero
from ..prove.packed import Asked, Ordered, Walked
from ..reverse.sweep import Reverse
from .programs import tiles_of

# What a carried number may be made of, so that it can be had one step earlier.
_PLAIN = ("add", "sub", "mul", "floordiv", "mod", "cdiv", "minimum", "maximum", "neg", "cast")

Written = TypeVar("Written", GradWrite, Store)


@dataclass
class Walk:
    """The writes of a kernel whose programs along `axis` walk a queue, as writes of tiles: by what they were,
    with the loops around them. `steps`: the loop over groups; `asked`: what the host has to find."""

    axis: int
    asked: list[Asked] = field(default_factory=list)
    steps: Region | None = None
    writes: dict[int, tuple[GradWrite, tuple[For, ...]]] = field(default_factory=dict)
    origins: dict[int, GradWrite] = field(default_factory=dict)


class NotWalked(Exception):
    """A loop is no queue, or a write needs more of a program than the tile."""


def find(reverse: Reverse, axes: list[int], grid: tuple[int, ...]) -> Walk | None:
    """The walk of a kernel's programs, if any of its atomic writes can do without."""
    queues: dict[Region, Queue | None] = {}
    found: Walk | None = None
    for write, loops in placed(reverse.effects, GradWrite):
        at = next((k for k, loop in enumerate(loops[:2]) if _starts_at_program(loop, loops[:k])), None)
        if write.kind == "store" or write.base.op != "param" or at is None:
            continue
        region = loops[at].region
        try:
            if region not in queues:
                queues[region] = None
                within = [w for w, around in placed(reverse.effects, GradWrite) if loops[at] in around]
                queues[region] = Queue(reverse.kernel.graph, loops[: at + 1], grid, within)
            queue = queues[region]
            if queue is None or queue.axis not in axes or found is not None and found.axis != queue.axis:
                continue
            new, around = queue.write(write, loops)
        except NotWalked:
            continue
        steps = None if queue.groups is None else queue.groups.region
        found = found or Walk(queue.axis, steps=steps)
        if found.steps is not steps:
            continue
        found.writes[id(write)], found.origins[id(new)] = (new, around), write
        found.asked = list(dict.fromkeys([*found.asked, *queue.asked]))
    return found


def of_stores(kernel: Kernel, axes: list[int], grid: tuple[int, ...]) -> tuple[Queue, list[Store]] | None:
    """The queue that all stores of a forward are in, and the stores as those of a tile."""
    stores = list(placed(kernel.effects, Store))
    loops = stores[0][1] if stores else ()
    at = next((k for k, loop in enumerate(loops[:2]) if _starts_at_program(loop, loops[:k])), None)
    if at is None or any(around != loops[: at + 1] for _, around in stores):
        return None
    try:
        queue = Queue(kernel.graph, loops[: at + 1], grid, [store for store, _ in stores])
        return (queue, [queue.write(*one)[0] for one in stores]) if queue.axis in axes else None
    except NotWalked:
        return None


def in_order(g: Graph, written: list[GradWrite], asked: list[Ordered]) -> dict[str, int | None]:
    """Add what tells whether tensors are in order, 0 or NaN, to the gradients that are written; returns
    the tensors, each with the least that its first number may be."""
    names = {one.name: None for one in asked}
    least = {
        name: max((o.least for o in asked if o.name == name and o.least is not None), default=None)
        for name in names
    }
    for write in written:
        for name in names:
            mark = (g.scratch(f"order_{name}", "float32"), g.const(0))
            order = g.make("load", mark, {"other": False, "buffer": True}, "float32", ())
            write.value = g.add(write.value, order)
    return least


def queued(g: Graph, steps: Region, group: Node, counts: dict[Node, Node], effects: list, name: str) -> For:
    """Some effects for each place of each group, by programs that walk a queue of those. `group` stands for a
    group's number; `counts`: how many there are of what stands for the places in it, outer ones first."""
    label = f"{name}_queue"
    program, programs = (
        g.intern(op, (), {"axis": 0, "kernel": label}, "int32", ()) for op in ("pid", "npid")
    )
    assert steps.iv is not None
    programs.hint = "programs"
    table = {group: steps.iv}
    tile, first = (g.fresh("phi", {"name": hint}, "int32", (), steps) for hint in ("tile", "first_tile"))
    tile.hint, first.hint = "tile", "first_tile"
    with g.at(steps):
        inner = [(n, c if c.dtype == "int32" else g.cast(c, "int32")) for n, c in counts.items()]
        last = g.add(first, g.product(count for _, count in inner))
        last.hint = "last_tile"
        trips = g.make("maximum", (g.make("cdiv", (g.sub(last, tile), programs)), g.const(0)))
        region = g.loop_region(tile, last, programs, "range", None)
        following = g.add(tile, g.mul(trips, programs))
    assert region.iv is not None
    region.iv.hint = "tile"
    with g.at(region):
        rest = g.sub(region.iv, first)
        rest.hint = "local"
        for number, count in inner[:0:-1]:
            table[number] = g.make("mod", (rest, count))
            rest = g.make("floordiv", (rest, count))
        table[inner[0][0]] = rest
    for number, node in table.items():
        node.hint = node.hint or number.hint
    graft = Graft(g, table, region)
    walk = For(region, steps, effects=[graft.effect(effect) for effect in effects])
    carries = [Carry(tile, program, following), Carry(first, g.const(0), last)]
    return For(steps, g.top, carries, [walk])


def _starts_at_program(loop: For, around: tuple[For, ...]) -> bool:
    """Whether a program's first step is its number, in the first group at least."""
    if loop.region.kind != "for" or loop.region.bounds is None:
        return False
    low = loop.region.bounds[0]
    if low.op == "phi":
        carry = _carry(around[-1], low) if around else None
        low = low if carry is None else carry.init
    return beneath(low, "cast").op == "pid"


def _carry(loop: For, phi: Node) -> Carry | None:
    """What a loop of the forward carries as `phi`; a loop of the backward undoes one."""
    return next((c for c in (loop.source or loop).carries if c.phi is phi), None)


class Queue:
    """The loop over a program's tiles, alone or within one over groups, and what replaces it."""

    def __init__(
        self, g: Graph, loops: tuple[For, ...], grid: tuple[int, ...], within: Sequence[GradWrite | Store]
    ) -> None:
        """`within`: the writes of its tiles. Raises NotWalked."""
        reverse, line = g.reverse, g.line
        g.reverse, g.line = False, loops[-1].region.line
        try:
            with g.at(loops[-1].region):
                self._find(g, loops, grid, within)
        finally:
            g.reverse, g.line = reverse, line

    def _find(
        self, g: Graph, loops: tuple[For, ...], grid: tuple[int, ...], within: Sequence[GradWrite | Store]
    ) -> None:
        self.g, self.region = g, loops[-1].region
        self.groups = loops[0] if len(loops) > 1 else None
        self.asked: list[Asked] = []
        self.split: list[Region] = []  # loops over rows and columns of tiles, where a number is made of those
        home = g.top if self.groups is None else self.groups.region
        if self.region.parent is not home or home.parent not in (None, g.top) or home.kind == "while":
            raise NotWalked
        assert self.region.bounds is not None
        low, high, step = self.region.bounds
        self.first: Node | None = None
        self.count = high
        if self.groups is not None and low.op == "phi":
            low = self._grouped(self.groups, low, high, step)
        self.axis: int = beneath(low, "cast").attrs["axis"]
        self._programs(step, grid)
        assert self.region.iv is not None
        self.local = self.region.iv if self.first is None else g.sub(self.region.iv, self.first)
        self.table: dict[Node, Node] = {}  # what replaces a value of a program
        if self.groups is not None:
            self.table |= self._carried(self.groups)
        self.used = self._nodes(within)
        self.graft = Graft(g, self.table, g.top)
        self.graft.regions[home] = home
        self.graft.regions[self.region] = self._tiles(home)

    def _grouped(self, loop: For, low: Node, high: Node, step: Node) -> Node:
        """Where a program's tiles begin in the first group, if they go on from one to the next, and a group's
        tiles begin where those of the one before end."""
        g, tile, end = self.g, _carry(loop, low), high
        asked_first = high.args[0] if high.op == "where" and high.args[2] is low else None
        if asked_first is not None:  # `tile >= first` too: that holds for whoever walks on
            end = high.args[1]
        sides = end.args if end.op == "add" else ()
        for first in (_carry(loop, side) for side in nodes_in(sides) if side.op == "phi" and side is not low):
            count = None if first is None else step_of(g, first.phi, end)
            if first is None or count is None or first.next is not end or not is_zero(first.init):
                continue
            if asked_first is not None and asked_first is not g.compare(">=", low, first.phi):
                continue
            with g.at(loop.region):  # as `while` leaves it
                trips = g.sub(high, low)
                if not is_number(step, 1):
                    trips = g.make("cdiv", (trips, step), dtype=promote((high, low, step)))
                after = g.add(low, g.mul(g.make("maximum", (trips, g.const(0))), step))
            if tile is None or tile.next is not after:
                raise NotWalked
            asked = self._natural(count, loop)
            if asked is None:
                raise NotWalked
            self.first, self.count = first.phi, count
            self.asked += asked
            return tile.init
        raise NotWalked

    def _natural(self, node: Node, loop: For) -> list[Asked] | None:
        """What has to hold so that a number is not negative in any step; None where that is not known."""
        node = beneath(node, "cast") if not node.is_float else node
        if natural(node):
            return []
        if node.op in ("mul", "cdiv", "floordiv", "minimum"):
            sides = [self._natural(arg, loop) for arg in node.args]
            return None if None in sides else [a for side in sides for a in side or ()]
        if node.op != "sub":
            return None
        end, begin = (beneath(arg, "cast") for arg in node.args)
        if not _number(end):
            return None
        name = end.args[0].attrs["name"]
        if begin.op == "phi":
            carry = _carry(loop, begin)
            last = None if carry is None or carry.next is None else beneath(carry.next, "cast")
            if carry is None or last is not end or carry.init.op != "const" or not self._rises(end, loop):
                return None
            return [Ordered(name, int(carry.init.value))]
        if not _number(begin) or begin.args[0] is not end.args[0]:
            return None
        gap = nonzero(Affine(self.g).terms(self.g.sub(end.args[1], begin.args[1]), ()))
        return [Ordered(name)] if set(gap) == {()} and set(gap[()]) == {()} and gap[()][()] > 0 else None

    def _rises(self, load: Node, loop: For) -> bool:
        """Whether a number is loaded further on in a later step."""
        form = nonzero(Affine(self.g).terms(load.args[1], ()))
        form.pop((), None)
        if len(form) != 1:
            return False
        ((variables, factors),) = form.items()
        return (
            len(variables) == 1
            and variables[0].region is loop.region
            and set(factors) == {()}
            and factors[()] > 0
        )

    def _programs(self, step: Node, grid: tuple[int, ...]) -> None:
        """Ask that as many programs start as each goes on by; fewer may where each has a tile at most."""
        g, whole = self.g, self.g.npid(self.axis)
        if step is whole:
            return
        few = self.count if self.first is None and on_host(self.count) else None
        known = [None if n is None else g.concrete(n, g.launched(grid)) for n in (step, few)]
        stride, tiles = known
        count = grid[self.axis] if self.axis < len(grid) else 1
        if not on_host(step) or stride is None or stride < 1:
            raise NotWalked
        if count != stride and not (tiles is not None and tiles <= count <= stride):
            raise NotWalked
        self.asked.append(Walked(self.axis, step, few))

    def _carried(self, loop: For) -> dict[Node, Node]:
        """What the loop over groups carries that is a value of the step before, as that."""
        g, region = self.g, loop.region
        assert region.iv is not None and region.bounds is not None
        low, _, step = region.bounds
        with g.at(region):
            later = g.compare(">", region.iv, low)
            before = g.sub(region.iv, step)
        found: dict[Node, Node] = {}

        def earlier(node: Node) -> Node:
            if node is region.iv:
                return before
            if node.home is g.top:
                return node
            if _number(node):  # what nothing has loaded is not loaded here
                attrs = {**node.attrs, "other": True, "before": True}
                return g.make(
                    "load", (node.args[0], earlier(node.args[1]), later, g.const(0)), attrs, node.dtype, ()
                )
            if node.shape or node.is_float or node.op not in _PLAIN or node.home is not region:
                raise NotWalked
            return g.again(node, [earlier(arg) for arg in node.args])

        for carry in (loop.source or loop).carries:
            if carry.next is None or carry.phi.is_float or carry.phi.shape:
                continue
            try:
                with g.at(region):
                    value = earlier(carry.next)
                    load = beneath(value, "cast")
                    if "before" in load.attrs and carry.init.op == "const":
                        args = (*load.args[:3], g.const(int(carry.init.value)))
                        value = g.make("load", args, load.attrs, load.dtype, ())
                    else:
                        value = g.make(
                            "where", (later, value, carry.init), {"before": True}, carry.phi.dtype, ()
                        )
                    if value.dtype != carry.phi.dtype:
                        value = g.cast(value, carry.phi.dtype)
            except NotWalked:
                continue
            if not self._of_tiles([value]):
                continue
            value.hint = value.hint or carry.phi.hint
            found[carry.phi] = value
        return found

    def _tiles(self, home: Region) -> Region:
        """Make the loops over the tiles of a group; what a tile is known by goes to the table."""
        g, line = self.g, self.region.line
        around = () if self.groups is None else self.groups.region.bounds or ()
        if not self._of_tiles([self.count, *around]):
            raise NotWalked
        count = self.graft.node(self.count)
        pair = self._digits() or self._swizzled()
        if pair is None:
            with g.at(home):
                region = g.loop_region(g.const(0), count, g.one, "range", line)
            self._stands_for(self.local, region, "tile")
            return region
        for (node, number), hint in zip(pair, ("tile_m", "tile_n"), strict=True):
            with g.at(home):
                home = g.loop_region(g.const(0), self.graft.node(number), g.one, "range", line)
            self._stands_for(node, home, hint)
            self.split.append(home)
        return home

    def _stands_for(self, node: Node | None, region: Region, hint: str) -> None:
        assert region.iv is not None
        if node is not None:
            region.iv.hint = region.iv.hint or node.hint or hint
            with self.g.at(region):
                same = node.dtype == region.iv.dtype
                self.table[node] = region.iv if same else self.g.cast(region.iv, node.dtype)

    def _digits(self) -> list[tuple[Node | None, Node]] | None:
        """Quotient and remainder of a tile's number in its group, with how many there are of each, where
        nothing else is made of it."""
        users = [n for n in self.used if self.local in n.args]
        split = {n.args[1] for n in users if n.op in ("floordiv", "mod") and n.args[0] is self.local}
        if len(split) != 1 or any(
            n.op not in ("floordiv", "mod") or n.args[0] is not self.local for n in users
        ):
            return None
        (columns,) = split
        rows = quotient(self.g, self.count, columns)
        if rows is None:
            return None
        if not natural(columns):
            asked = None if self.groups is None else self._natural(columns, self.groups)
            if asked is None:
                return None
            self.asked += asked
        high, low = (next((n for n in users if n.op == op), None) for op in ("floordiv", "mod"))
        return [(high, rows), (low, columns)]

    def _swizzled(self) -> list[tuple[Node | None, Node]] | None:
        """The row and the column of a tile that a group of rows has column by column."""
        pair = tiles_of(self.g, self.used, self.local)
        if pair is None or not all(natural(number) for _, number in pair):
            return None
        (row, rows), (column, columns) = pair
        if quotient(self.g, self.count, columns) is not rows:
            return None
        return [(row, rows), (column, columns)]

    # writes

    def _nodes(self, writes: Sequence[GradWrite | Store]) -> list[Node]:
        """All values that the tiles' writes are made of."""
        return [
            n
            for n in reachable([p for w in writes for p in self._roots(w)], self._parts)
            if isinstance(n, Node)
        ]

    def _roots(self, write: GradWrite | Store) -> list[Node]:
        """A write's values, and those that the loops and branches around it hang on."""
        inner = [r for r in write.region.chain() if r is not self.region and r.inside(self.region)]
        around = [n for r in inner for n in (*(r.bounds or ()), r.cond) if n is not None]
        return [n for n in (write.value, write.offset, write.mask, *around) if n is not None]

    def _parts(self, item: object) -> list:
        inner = isinstance(item, Node) and item.op == "iv" and item.home is not self.region
        bounds = item.home.bounds if inner else None  # type: ignore[union-attr, attr-defined]
        return [*operands(item), *(bounds or ())]

    def _of_tiles(self, roots: list[Node]) -> bool:
        """Whether values hang on nothing of a program but its tiles."""
        found = list(reachable(roots, lambda n: [] if n in self.table else self._parts(n)))
        loops = [item for item in found if isinstance(item, For)]
        carried = {carry.phi for loop in loops for carry in loop.carries}
        for item in found:
            if item in self.table or item in carried:
                continue
            if isinstance(item, If):
                plain = not (item.then_effects or item.other_effects)
            elif isinstance(item, For):
                plain = not (item.effects or item.tape or item.provides or item.cond)
            else:
                own = item in (self.region.iv, self.g.pid(self.axis))
                plain = not (own or item.op == "phi" or item.attrs.get("buffer"))
            if not plain:
                return False
        return True

    def write(self, write: Written, loops: tuple[For, ...]) -> tuple[Written, tuple[For, ...]]:
        """A write as one of a tile, and the loops around it. Raises NotWalked."""
        if any(loop.order == "reverse" for loop in loops):
            raise NotWalked
        if not self._of_tiles(self._roots(write)):
            raise NotWalked
        region = self.graft.region(write.region)
        new = replace(mapped(write, self.graft.node), region=region)
        around = [(r, r.parent) for r in region.chain() if r.is_loop and r.parent is not None][::-1]
        return new, tuple(For(r, outer, order="any", line=r.line) for r, outer in around)


def _number(node: Node) -> bool:
    """Whether a value is one integer that is loaded from an argument, whatever else is so."""
    return (
        node.op == "load" and not node.shape and not node.is_float
        and len(node.args) == 2 and node.args[0].op == "param"
    )  # fmt: skip

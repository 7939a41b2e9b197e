"""Forward values in the reverse sweep: from a stored output, computed again in a loop, or from a tape.

In this order: (1) a value that the forward stored is loaded back where computing it again would take a
loop; (2) a loop that was telescoped ends at the values of the original, which needs one sweep less; (3) a
reverse loop whose order is free runs forward and carries the forward's state along; (4) what each step
writes in lanes of its own is what it is at the end; (5) only what is left is taped: a forward sweep writes
the carry before each step to scratch, the reverse loop reads it back. Every program has a slice of its own,
so a barrier between the two sweeps is enough. (6) A tape that would be too large has checkpoints instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...errors import readable
from ..ir import counts
from ..ir.folding import fold
from ..ir.graph import Graph
from ..ir.kinds import MIXING
from ..ir.names import suggested
from ..ir.nodes import (
    BYTES,
    Carry,
    For,
    Node,
    Region,
    Store,
    TapeStore,
    beneath,
    bodies,
    nodes_in,
    operands,
    reachable,
    real,
    walk,
)
from ..ir.refusal import Refusal
from ..ir.rewriter import Rewriter
from ..ir.values import takes_loop
from ..prove import zeros
from ..prove.affine import upper
from . import checkpoints, kept_numbers
from .sweep import Reverse
from .written_once import element, ended, kept_whole, lanes_written, rounds

STEPS = "tape_steps"
LIMIT = 1 << 30  # bytes of a tape in the traced call, above which it has checkpoints


@dataclass
class Buffer:
    """Scratch for one taped value: `trips` steps of `numel` elements for each program."""

    name: str
    dtype: str
    trips: Node
    numel: Node
    carry: str
    slots: str = STEPS  # how many a program has: one a step, one a checkpoint, or one a step of a segment


def use_stored(reverse: Reverse, summed: bool = False) -> None:
    """Replace forward values that need a loop by loads of the outputs that hold them; `summed`: also those
    that need a sum over a block. Not of those that hold them rounded, where the reverse is to be exact."""
    kernel, g = reverse.kernel, reverse.kernel.graph
    loads: dict[Node, Node] = {}
    for value, store in _stored(reverse, summed):
        args = [store.base, store.offset]
        if store.mask is not None:  # no derivative of a root, a quotient or a logarithm is infinite at 1
            args += [store.mask, g.number(1 if takes_loop(value) else 0)]
        g.here, g.reverse, g.line = store.region, False, store.line
        raw = g.make("load", args, {"other": store.mask is not None}, element(store), value.shape)
        loads[value] = g.cast(raw, value.dtype)
        loads[value].hint = value.hint
        g.reverse, g.here = True, g.top
    before = set(reachable(reverse.effects))
    table = kernel.equal | loads
    # Those are zero in lanes that were not stored, as the product is.
    whole = [v for v in loads if v.op == "div" and v.home is g.top and not takes_loop(v)]
    quotients = {v.args: loads[v] for v in whole}

    def held(node: Node) -> Node | None:
        for part, over in (node.args, node.args[::-1]) if node.op == "mul" else ():
            if part.op == "div" and (over, part.args[1]) in quotients:  # x / total * e, of a stored e / total
                return g.mul(rewriter.node(part.args[0]), quotients[over, part.args[1]])
        return table.get(node)

    rewriter = Rewriter(g, held)
    reverse.effects = rewriter.effects(reverse.effects)
    for value, load in loads.items():
        if value in before:
            base = beneath(load, "cast").args[0]
            reverse.rounded |= rounds(base, value)
            reason = f"read back from `{base.attrs['name']}` instead of recomputed"
            reverse.say(value.line, "stored", "one store", reason)


def holds_sums(reverse: Reverse) -> bool:
    """Whether an output holds a block that the backward would have to sum over to make it again."""
    used = set(reachable(reverse.effects))
    return any(value in used and not takes_loop(value) for value, _ in _stored(reverse, True))


def _stored(reverse: Reverse, summed: bool) -> Iterator[tuple[Node, Store]]:
    """What outputs hold after the launch, and nothing but their store uses."""
    kernel = reverse.kernel
    uses = Counter(n for item in reachable(kernel.effects) for n in operands(item) if isinstance(n, Node))
    for store in [e for e in walk(kernel.effects) if isinstance(e, Store)]:
        value = beneath(store.value, "cast")
        if not kept_whole(kernel, store) or store.base.op != "param" or not value.is_float:
            continue
        if reverse.exact and rounds(store.base, value):
            continue
        if not takes_loop(value) and not (summed and _is_summed(value, store)):
            continue
        if value.op in ("load", "const", "full", "phi", "loopout") or _used_elsewhere(store.value, uses):
            continue
        if value.home is store.value.home and store.region is value.home:
            yield value, store


def _is_summed(value: Node, store: Store) -> bool:
    """Whether a block took a sum over lanes, and is zero in those that were not stored: the gradient of the
    sum is of all lanes."""
    summed = any(n.op == "reduce" and n.is_float for n in nodes_in([value]))
    return bool(value.shape) and summed and zeros.not_stored(value, store)


def _used_elsewhere(value: Node, uses: Counter[Node]) -> bool:
    """Whether anything but a store uses a value, or what it is a cast of."""
    while value.op == "cast" and uses[value] < 2:
        value = value.args[0]
    return uses[value] > 1


def _mixes_lanes(value: Node) -> bool:
    """Whether lanes meet in a value, so that one that a mask leaves out may reach another."""
    return any(n.op in MIXING and n.is_float for n in nodes_in([value]))


def step_number(g: Graph, region: Region) -> Node:
    """The number of a step of a loop, within it."""
    assert region.iv is not None and region.bounds is not None
    lo, _, step = region.bounds
    with g.at(region):
        return g.make("floordiv", (g.sub(region.iv, lo), step))


def trip_count(g: Graph, loop: For) -> Node | None:
    """How many steps a loop has at most, as the host knows it."""
    assert loop.region.bounds is not None
    lo, hi, step = loop.region.bounds
    count = g.make("cdiv", (g.sub(hi, lo), step))
    known = upper(g, count)
    return counts.longest(g, count) if known is None else known


def _bounded(loop: For) -> str:
    """What to do about a loop of which the host cannot tell the length."""
    assert loop.region.bounds is not None
    shared_out = any(n.op == "pid" for bound in loop.region.bounds for n in nodes_in([bound]))
    two = "one over tiles, `for tile in range(tl.program_id(0), TILES, PROGRAMS)`, around one over steps"
    return (
        f"Write the loop over all steps of all tiles as two: {two}."
        if shared_out
        else "Bound the loop by arguments."
    )


class Tape:
    """Decides for every reverse loop how it gets at the carries of its forward loop."""

    def __init__(self, reverse: Reverse, measure: Callable[[Buffer], int] | None = None) -> None:
        """`measure` gives the bytes of a buffer in the traced call; without it there are no checkpoints."""
        self.reverse, self.g, self.measure = reverse, reverse.kernel.graph, measure
        self.buffers: list[Buffer] = []
        self.naive: list[Buffer] = []

    def run(self) -> Tape:
        self._effects(self.reverse.effects)
        return self

    def _effects(self, effects: list) -> None:
        for effect in effects:
            for body in bodies(effect):
                self._effects(body)
            if isinstance(effect, For) and effect.source is not None:
                self._loop(effect, effect.source)

    def _loop(self, loop: For, source: For) -> None:
        phis = {carry.phi: k for k, carry in enumerate(source.carries)}
        needed = [phis[n] for n in self._inside(_roots(loop), loop) if n in phis]
        if not needed:
            return
        if loop.order != "reverse":
            self._accompany(loop, source, phis, needed)
            return
        provided = {k: self._known(source, k) if source.region.kind == "for" else None for k in set(needed)}
        missing = sorted(k for k, read in provided.items() if read is None)
        if missing and self._keep_numbers(loop, source, missing):
            needed = [phis[n] for n in self._inside(_roots(loop), loop) if n in phis]
            provided = {k: read for k, read in provided.items() if k in needed}
            missing = []
        if (
            missing
            and self._too_large(source, [source.carries[k].phi for k in missing])
            and checkpoints.possible(loop)
        ):
            self._checkpoint(loop, source, phis, missing, provided)
            return
        for k, read in sorted(provided.items()):
            if read is not None:
                loop.provides[source.carries[k].phi] = read
            else:
                self._tape(loop, source, k)

    def _too_large(self, source: For, values: list[Node]) -> bool:
        """Whether a full tape of some values would exceed the limit in the traced call."""
        if self.measure is None or source.region.kind != "for":
            return False
        return sum(self.measure(self._buffer(source, value, "tape", STEPS)) for value in values) > LIMIT

    def _keep_numbers(self, loop: For, source: For, missing: list[int]) -> bool:
        """Keep what is made of some carries before every step, where that is less and all that is needed."""
        g, carried = self.g, [source.carries[k].phi for k in missing]
        numbers = kept_numbers.find(loop, _roots(loop), set(carried)) if source.region.kind == "for" else []
        if not numbers or self._too_large(source, numbers):
            return False
        table = {number: self._taped(source, number) for number in numbers}
        rewriter = Rewriter(g, table.get)
        loop.effects = rewriter.effects(loop.effects)
        for carry in loop.carries:
            carry.next = None if carry.next is None else rewriter.node(carry.next)
        g.here = g.top
        names = ", ".join(f"`{phi.hint}`" for phi in carried)
        reason = f"of {names} a few numbers a step are needed in reverse order: a tape of those"
        self.reverse.say(source.line, "tape", "none", reason)
        return True

    def _checkpoint(
        self, loop: For, source: For, phis: dict[Node, int], missing: list[int], provided: dict
    ) -> None:
        """Tape the state at the start of every segment, and that of one segment's steps at a time."""
        g = self.g
        state = self._closure(source, phis, missing)
        at, part, segment = checkpoints.places(g, source)
        length = g.param(checkpoints.SEGMENT)
        g.here = source.region
        first = g.compare("==", g.make("mod", (at, length)), g.const(0))
        number = g.make("floordiv", (at, length))
        starts: dict[int, Node] = {}
        for k in state:
            kept = self._keep(source, source.carries[k].phi, "check", checkpoints.CHECKPOINTS)
            store = self._store(kept, number, source.carries[k].phi, source.region)
            store.mask = first
            source.tape.append(store)
            starts[k] = self._read(kept, part, source.carries[k].phi, segment.parent)  # type: ignore[arg-type]
        forward, copies = checkpoints.again(g, source, segment, starts)
        at = step_number(g, segment)
        g.here = segment
        reads = {}
        for k in missing:
            kept = self._keep(source, source.carries[k].phi, "tape", checkpoints.SEGMENT)
            forward.tape.append(self._store(kept, at, copies[k], segment))
            reads[copies[k]] = self._read(kept, at, copies[k], segment)
        table = {k: copies[k] for k in missing}
        for k, read in provided.items():
            if read is not None:
                table[k] = checkpoints.moved(g, source, segment, read)
        inner = checkpoints.segmented(g, loop, source, forward, table)
        inner.provides.update(reads)
        g.here = g.top
        names = ", ".join(f"`{source.carries[k].phi.hint}`" for k in missing)
        why = f"a full tape would exceed {readable(LIMIT, 'B', 2)}"
        reason = f"{names}: {why}: checkpoints, the steps between them run again"
        self.reverse.say(source.line, "tape", "none", reason)

    def _inside(self, roots: list, loop: For) -> list[Node]:
        """What the body computes; values from outside come as they are, whatever loop they took."""

        def inside(item: object) -> bool:
            return not isinstance(item, Node) or item.home.inside(loop.region)

        def parts(item: object) -> list:
            return [part for part in operands(item) if inside(part)]

        found = reachable([root for root in roots if root is not None and inside(root)], parts)
        return [item for item in found if isinstance(item, Node)]

    def _accompany(self, loop: For, source: For, phis: dict[Node, int], needed: list[int]) -> None:
        """Carry the forward's state along in a reverse loop that runs forward."""
        for k in self._closure(loop, phis, needed, source):
            carry = source.carries[k]
            loop.carries.append(Carry(carry.phi, carry.init, carry.next))
        loop.order = "forward"

    def _closure(
        self, loop: For, phis: dict[Node, int], needed: list[int], source: For | None = None
    ) -> list[int]:
        """The carries that some need in the next step, themselves included."""
        source = source or loop
        todo, done = list(needed), set()
        while todo:
            k = todo.pop()
            if k in done:
                continue
            done.add(k)
            carry = source.carries[k]
            todo += [phis[n] for n in self._inside([carry.next], loop) if n in phis]
        return sorted(done)

    def _known(self, source: For, k: int) -> Node | None:
        """The carry before a step, where it need not be kept."""
        read = self._stored(source, k)
        return self._lane_by_lane(source, k) if read is None else read

    def _lane_by_lane(self, source: For, k: int) -> Node | None:
        """The carry before a step, where each step writes the lanes of its own number alone, as in a
        substitution: those before it have what they have at the end, the others what they began with."""
        g, carry, region = self.g, source.carries[k], source.region
        with g.at(region):
            written = lanes_written(g, carry, region)
            if written is None:
                return None
            read = g.where(written, ended(self.reverse, source, k), carry.init)
        read.hint = f"{carry.phi.hint}_before"
        reason = f"`{carry.phi.hint}`: a step writes the lanes of its number alone: no tape"
        self.reverse.say(source.line, "stored", "one store", reason)
        return read

    def _stored(self, source: For, k: int) -> Node | None:
        """The carry before a step, where the forward stored it after the last one: nothing is taped."""
        g, carry, region = self.g, source.carries[k], source.region
        lo, _, step = region.bounds  # type: ignore[misc]
        for store in source.effects:
            if not isinstance(store, Store) or store.region is not region:
                continue
            value = beneath(store.value, "cast")
            if store.base.op == "entry" or self.reverse.exact and rounds(store.base, value):
                continue
            if value is carry.phi and kept_whole(self.reverse.kernel, store) and zeros.left_out(carry, store):
                return self._before(source, k, store)
            if value is not carry.next:
                continue
            if not kept_whole(self.reverse.kernel, store):
                continue
            if (
                _mixes_lanes(value)
                and store.mask is not None
                or not zeros.unread(self.reverse.kernel.effects, source, k, store)
            ):
                continue
            g.here = region
            moved = {region.iv: g.sub(region.iv, step)}  # type: ignore[arg-type]
            before = Rewriter(g, moved.get)
            later = g.compare(">", region.iv, lo)  # type: ignore[arg-type]
            mask = later if store.mask is None else g.both(before.node(store.mask), later)
            offset = before.node(store.offset)
            args = (store.base, offset, mask, g.number(0))
            raw = g.make("load", args, {"other": True}, element(store), offset.shape)
            # Lanes that were not stored go on from where they began: the step has a derivative there.
            known = later if mask.shape and mask.shape != carry.phi.shape else mask
            read = g.where(known, g.cast(raw, carry.phi.dtype), carry.init)
            read.hint = f"{carry.phi.hint}_before"
            g.here = g.top
            name = store.base.attrs["name"]
            reason = f"`{carry.phi.hint}` is read back from `{name}`, where the step before stored it"
            self.reverse.say(source.line, "stored", "one store", reason)
            self.reverse.rounded |= rounds(store.base, value)
            return read
        return None

    def _before(self, source: For, k: int, store: Store) -> Node:
        """The carry before a step, where the forward stored it in the same step; lanes that it left out are
        zero."""
        g, carry = self.g, source.carries[k]
        g.here = source.region
        args = [store.base, store.offset, *([store.mask, g.number(0)] if store.mask is not None else [])]
        attrs = {"other": store.mask is not None}
        read = g.cast(g.make("load", args, attrs, element(store), store.offset.shape), carry.phi.dtype)
        read.hint = carry.phi.hint
        self.reverse.rounded |= rounds(store.base, carry.phi)
        g.here = g.top
        reason = (
            f"`{carry.phi.hint}` is read back from `{store.base.attrs['name']}`, where each step stored it"
        )
        self.reverse.say(source.line, "stored", "one store", reason)
        return read

    def _tape(self, loop: For, source: For, k: int) -> None:
        """Keep a carry before every step."""
        phi = source.carries[k].phi
        if source.region.kind != "for":
            message = "the state of a while loop cannot be taped"
            raise Refusal("while", message, "Use a loop over a range.", source.line)
        loop.provides[phi] = self._taped(source, phi)
        self.g.here = self.g.top
        reason = f"`{phi.hint}` is needed in reverse order: {real(phi.dtype)} tape in scratch"
        self.reverse.say(source.line, "tape", "none", reason)

    def _taped(self, source: For, value: Node) -> Node:
        """What reads a value of every step back from a tape."""
        buffer = self._keep(source, value, "tape", STEPS)
        at = step_number(self.g, source.region)
        source.tape.append(self._store(buffer, at, value, source.region))
        return self._read(buffer, at, value, source.region)

    def _buffer(self, source: For, value: Node, prefix: str, slots: str) -> Buffer:
        """Scratch for a value of every step of a loop."""
        g = self.g
        numel = g.product(value.shape)
        g.here = g.top
        trips = trip_count(g, source)
        if trips is None:
            message = "the length of this loop is not known before the launch"
            raise Refusal("tape", message, _bounded(source), source.line)
        called = value.hint or suggested(value, {})
        name = f"{prefix}_{called}"
        taken = {STEPS, checkpoints.SEGMENT, checkpoints.CHECKPOINTS, *(b.name for b in self.buffers)}
        while name in taken:
            name += "_"
        return Buffer(name, real(value.dtype), trips, numel, called, slots)

    def _keep(self, source: For, value: Node, prefix: str, slots: str) -> Buffer:
        buffer = self._buffer(source, value, prefix, slots)
        self.buffers.append(buffer)
        return buffer

    def _store(self, buffer: Buffer, at: Node, value: Node, region: Region) -> TapeStore:
        return TapeStore(buffer.name, self._index(buffer, at, value, region), value, region)

    def _read(self, buffer: Buffer, at: Node, like: Node, region: Region) -> Node:
        g = self.g
        index = self._index(buffer, at, like, region)
        base = g.scratch(buffer.name, buffer.dtype)
        read = g.make("load", (base, index), {"other": False, "buffer": True}, like.dtype, like.shape)
        read.hint = like.hint
        return read

    def _index(self, buffer: Buffer, at: Node, like: Node, region: Region) -> Node:
        """Where a program keeps its entry number `at`."""
        g = self.g
        g.here = region
        index = g.add(g.mul(self._slice(buffer), buffer.numel), g.mul(at, buffer.numel))
        for axis in range(len(like.shape)):
            index = g.add(index, self.g.lanes(like.shape, axis))
        return index

    def _slice(self, buffer: Buffer) -> Node:
        """The program's first entry: its number times the entries that the longest loop needs."""
        g = self.g
        pids = [g.pid(a) for a in range(3)]
        counts = [g.npid(a) for a in range(3)]
        linear = g.cast(pids[2], "int64")
        for axis in (1, 0):
            linear = g.add(g.mul(linear, counts[axis]), pids[axis])
        return g.mul(linear, g.param(buffer.slots))


def _roots(loop: For) -> list:
    """What a loop has to compute."""
    found = [*loop.effects, *(carry.next for carry in loop.carries), loop.cond]
    return [one for one in found if one is not None]


def size(buffer: Buffer, site) -> int:
    """Bytes of a buffer in the traced call."""
    g, grid = site.kernel.graph, site.launch.grid

    def number(node: Node) -> int:
        if node.op == counts.OP:
            return counts.traced(g, node, site.launch.args, grid) or 1
        if node.op == "npid":
            axis = node.attrs["axis"]
            return grid[axis] if axis < len(grid) else 1
        known = g.concrete(node)
        return int(fold(node.op, list(map(number, node.args)), node.attrs) if known is None else known)

    each = entries(buffer, number(buffer.trips)) * number(buffer.numel) * BYTES.get(buffer.dtype, 4)
    return math.prod(grid) * each


def entries(buffer: Buffer, trips: int) -> int:
    """How many entries a program has, as the host computes it."""
    steps = max(trips, 1)
    segment = int(steps**0.5) + 1
    return {STEPS: steps, checkpoints.SEGMENT: segment}.get(buffer.slots, steps // segment + 2)


def naive(site) -> int:
    """Bytes that taping every differentiable carry of the forward would take in the traced call."""
    g, total = site.kernel.graph, 0
    loops = [item for item in reachable(site.kernel.effects) if isinstance(item, For) and item.region.bounds]
    for loop in loops:
        trips = trip_count(g, loop)
        for phi in (carry.phi for carry in loop.carries if carry.phi.active):
            if trips is not None:
                total += size(Buffer("", real(phi.dtype), trips, g.product(phi.shape), ""), site)
    return total

"""Forward values in the reverse sweep: from a stored output, recomputed beside a loop that runs forward, or from a tape.

In this order: (1) a value that the forward stored is loaded back where computing it again would take a loop; (2) a loop that was
telescoped ends at the values of the original, which needs one sweep less; (3) a reverse loop whose order is free runs forward and
carries the forward's state along; (4) only what is left is taped: a forward sweep writes the carry before each step to scratch,
the reverse loop reads it back. Every program has a slice of its own, so a barrier between the two sweeps is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

from .affine import upper
from .fence import Refusal
from .ir import Carry, For, If, Node, Store, TapeStore, fold, operands, reachable, real, walk
from .reverse import LineReport, Reverse
from .rewrite import Rewriter

BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass
class Buffer:
    """Scratch for one taped carry: `trips` steps of `numel` elements for each program."""

    name: str
    dtype: str
    trips: Node
    numel: Node
    carry: str


def use_stored(reverse: Reverse) -> None:
    """Replace forward values that need a loop by loads of the outputs that hold them."""
    kernel, g = reverse.kernel, reverse.kernel.graph
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    uses = _uses(kernel.effects)
    loads: dict[Node, Node] = {}
    for store in stores:
        value = store.value
        while value.op == "cast":
            value = value.args[0]
        alone = sum(s.base is store.base for s in stores) == 1 and store.base.op == "param"
        if (
            not alone
            or store.kind != "store"
            or store.base.attrs["name"] in kernel.inplace
            or not value.is_float
        ):
            continue
        if (
            value.op in ("load", "const", "full", "phi", "loopout")
            or uses.get(value, 0) > 1
            or not _loops_in(value)
        ):
            continue
        if value.home is not store.value.home or store.region is not value.home:
            continue
        args = [store.base, store.offset]
        if store.mask is not None:
            args += [store.mask, g.number(0)]
        g.here, g.reverse, g.line = store.region, False, store.line
        elem = f"${store.base.attrs['elem']}:{store.base.attrs['name']}"
        raw = g.make("load", args, {"other": store.mask is not None}, elem, value.shape)
        loads[value] = g.cast(raw, value.dtype)
        loads[value].hint = value.hint
        g.reverse, g.here = True, g.top
    table = {**kernel.equal}

    def replace(node: Node) -> Node | None:
        if node in loads:
            return loads[node]
        return table.get(node)

    before = set(reachable(reverse.effects))
    rewriter = Rewriter(g, replace)
    reverse.effects = rewriter.effects(reverse.effects)
    for value, load in loads.items():
        if value in before:
            name = load.args[0].args[0].attrs["name"] if load.op == "cast" else load.args[0].attrs["name"]
            reverse.report.append(
                LineReport(
                    value.line, "stored", "one store", f"read back from `{name}` instead of recomputed"
                )
            )


def _uses(effects: list) -> dict[Node, int]:
    count: dict[Node, int] = {}
    for item in reachable(effects):
        for node in operands(item):
            if isinstance(node, Node):
                count[node] = count.get(node, 0) + 1
    return count


def _mixes_lanes(value: Node) -> bool:
    """Whether lanes meet in a value, so that one that a mask leaves out may reach another."""
    mixing = (
        "reduce",
        "dot",
        "scan",
        "affine",
        "permute",
        "reshape",
        "argreduce",
        "flip",
        "join",
        "split",
        "gather",
    )
    return any(isinstance(n, Node) and n.op in mixing and n.is_float for n in reachable([value]))


def _loops_in(node: Node) -> bool:
    return any(isinstance(n, Node) and n.op == "loopout" for n in reachable([node]))


class Tape:
    """Decides for every reverse loop how it gets at the carries of its forward loop."""

    def __init__(self, reverse: Reverse) -> None:
        self.reverse, self.g = reverse, reverse.kernel.graph
        self.buffers: list[Buffer] = []
        self.naive: list[Buffer] = []

    def run(self) -> Tape:
        self._effects(self.reverse.effects)
        return self

    def _effects(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, For):
                self._effects(effect.effects)
                self._loop(effect)
            elif isinstance(effect, If):
                self._effects(effect.then_effects)
                self._effects(effect.other_effects)

    def _loop(self, loop: For) -> None:
        source = loop.source
        if source is None:
            return
        phis = {carry.phi: k for k, carry in enumerate(source.carries)}
        roots = [
            *loop.effects,
            *(c.next for c in loop.carries),
            *([loop.cond] if loop.cond is not None else []),
        ]
        needed = [phis[n] for n in self._inside(roots, loop) if n in phis]
        if not needed:
            return
        if loop.order != "reverse":
            self._accompany(loop, source, phis, needed)
            return
        for k in sorted(set(needed)):
            self._tape(loop, source, k)

    def _inside(self, roots: list, loop: For) -> list[Node]:
        """What the body computes; values from outside come as they are, whatever loop they took."""
        found: list[Node] = []
        stack, seen = [r for r in roots if r is not None], set()
        while stack:
            item = stack.pop()
            if id(item) in seen or (isinstance(item, Node) and not item.home.inside(loop.region)):
                continue
            seen.add(id(item))
            stack += operands(item)
            if isinstance(item, Node):
                found.append(item)
        return found

    def _accompany(self, loop: For, source: For, phis: dict[Node, int], needed: list[int]) -> None:
        """Carry the forward's state along in a reverse loop that runs forward."""
        todo, done = list(needed), set()
        while todo:
            k = todo.pop()
            if k in done:
                continue
            done.add(k)
            carry = source.carries[k]
            todo += [phis[n] for n in self._inside([carry.next], loop) if n in phis]
        for k in sorted(done):
            carry = source.carries[k]
            loop.carries.append(Carry(carry.phi, carry.init, carry.next))
        loop.order = "forward"

    def _stored(self, source: For, k: int) -> Node | None:
        """The carry before a step, where the forward stored it after the step before: read back, nothing is taped."""
        g, carry, region = self.g, source.carries[k], source.region
        lo, _, step = region.bounds  # type: ignore[misc]
        for store in source.effects:
            if not isinstance(store, Store) or store.kind != "store" or store.region is not region:
                continue
            value = store.value
            while value.op == "cast":
                value = value.args[0]
            name = store.base.attrs["name"]
            forward = [e for e in walk(self.reverse.kernel.effects) if isinstance(e, Store)]
            alone = (
                sum(e.base is store.base for e in forward) == 1 and name not in self.reverse.kernel.inplace
            )
            if (
                store.base.op == "entry"
                or value is not carry.next
                or not alone
                or (store.mask is not None and _mixes_lanes(value))
            ):
                continue
            g.here = region
            back = g.sub(region.iv, step)  # type: ignore[arg-type]
            moved = {region.iv: back}
            before = Rewriter(g, moved.get)
            later = g.make("compare", (region.iv, lo), {"cmp": ">"}, "int1")  # type: ignore[arg-type]
            mask = later
            if store.mask is not None:
                mask = g.make("and", (before.node(store.mask), later), {}, "int1")
            offset = before.node(store.offset)
            elem = f"${store.base.attrs['elem']}:{name}"
            raw = g.make("load", (store.base, offset, mask, g.number(0)), {"other": True}, elem, offset.shape)
            read = g.where(later, g.cast(raw, carry.phi.dtype), carry.init)
            read.hint = f"{carry.phi.hint}_before"
            g.here = g.top
            reason = f"`{carry.phi.hint}` is read back from `{name}`, where the step before stored it"
            self.reverse.report.append(LineReport(source.line, "stored", "one store", reason))
            return read
        return None

    def _tape(self, loop: For, source: For, k: int) -> None:
        g, carry = self.g, source.carries[k]
        if source.region.kind != "for":
            raise Refusal(
                "while", "the state of a while loop cannot be taped", "Use a loop over a range.", source.line
            )
        read = self._stored(source, k)
        if read is not None:
            loop.provides[carry.phi] = read
            return
        lo, hi, step = source.region.bounds  # type: ignore[misc]
        numel = g.one
        for dim in carry.phi.shape:
            numel = g.mul(numel, dim)
        g.here = g.top
        trips = upper(g, g.make("cdiv", (g.sub(hi, lo), step)))
        if trips is None:
            raise Refusal(
                "tape",
                "the length of this loop is not known before the launch",
                "Bound the loop by arguments.",
                source.line,
            )
        name = f"tape_{carry.phi.hint or 'carry'}"
        while any(b.name == name for b in self.buffers):
            name += "_"
        dtype = carry.phi.dtype
        buffer = Buffer(name, real(dtype), trips, numel, carry.phi.hint or "carry")
        self.buffers.append(buffer)
        g.here = source.region
        at = g.make("floordiv", (g.sub(source.region.iv, lo), step))  # type: ignore[arg-type]
        index = g.add(g.mul(self._slice(buffer), numel), g.mul(at, numel))
        for axis in range(len(carry.phi.shape)):
            index = g.add(index, self._lanes(carry.phi.shape, axis))
        base = g.intern("param", (), {"name": name, "none": False, "elem": buffer.dtype}, "pointer", ())
        source.tape.append(TapeStore(name, index, carry.phi, source.region))
        read = g.make("load", (base, index), {"other": False, "buffer": True}, dtype, carry.phi.shape)
        read.hint = carry.phi.hint
        loop.provides[carry.phi] = read
        g.here = g.top
        reason = f"`{carry.phi.hint}` is needed in reverse order: {buffer.dtype} tape in scratch"
        self.reverse.report.append(LineReport(source.line, "tape", "none", reason))

    def _slice(self, buffer: Buffer) -> Node:
        """The program's first step in the tape: its number times the longest trip count."""
        g = self.g
        pids = [g.intern("pid", (), {"axis": a}, "int32", ()) for a in range(3)]
        counts = [g.intern("npid", (), {"axis": a}, "int32", ()) for a in range(3)]
        linear = g.cast(pids[2], "int64")
        linear = g.add(g.mul(linear, counts[1]), pids[1])
        linear = g.add(g.mul(linear, counts[0]), pids[0])
        steps = g.intern("param", (), {"name": "tape_steps"}, "int32", ())
        return g.mul(linear, steps)

    def _lanes(self, shape: tuple, axis: int) -> Node:
        g = self.g
        lane = g.make("arange", (g.const(0), shape[axis]), {}, "int32", (shape[axis],))
        for other in range(len(shape)):
            if other != axis:
                lane = g.expand(lane, other)
        for dim in shape[axis + 1 :]:
            lane = g.mul(lane, dim)
        return lane


def size(buffer: Buffer, site) -> int:
    """Bytes of a buffer in the traced call."""
    g, grid = site.kernel.graph, site.launch.grid

    def number(node: Node) -> int:
        if node.op == "npid":
            axis = node.attrs["axis"]
            return grid[axis] if axis < len(grid) else 1
        known = g.concrete(node)
        return (
            int(known)
            if known is not None
            else int(fold(node.op, [number(a) for a in node.args], node.attrs))
        )

    programs = 1
    for extent in grid:
        programs *= extent
    return programs * max(number(buffer.trips), 1) * number(buffer.numel) * BYTES.get(buffer.dtype, 4)


def naive(site) -> int:
    """Bytes that taping every differentiable carry of the forward would take in the traced call."""
    g, total = site.kernel.graph, 0
    for loop in [
        item for item in reachable(site.kernel.effects) if isinstance(item, For) and item.region.bounds
    ]:
        lo, hi, step = loop.region.bounds  # type: ignore[misc]
        trips = upper(g, g.make("cdiv", (g.sub(hi, lo), step)))
        for carry in loop.carries:
            if trips is None or not carry.phi.active:
                continue
            numel = g.one
            for dim in carry.phi.shape:
                numel = g.mul(numel, dim)
            total += size(Buffer("", real(carry.phi.dtype), trips, numel, ""), site)
    return total

"""The values and effects of one step of a loop, for a tile of steps at once: with a leading axis where they
hang on which step it is, and as they are where they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...source import words
from ..ir.graph import ELEMENTWISE, Graph
from ..ir.kinds import LANEWISE
from ..ir.names import stem
from ..ir.nodes import For, GradWrite, If, Node, Region, beneath
from ..ir.spelling import gradient_name
from .linear_carries import Body, Stays

# What is done for each element alone, whatever lies beside it.
_ALIKE = (ELEMENTWISE | LANEWISE | words("invert floordiv mod xor shl shr")) - words("expand broadcast")
# Also of what is the same in all steps of a tile.
_UNIFORM = _ALIKE | words("full arange load not land lor select cdiv isnone")
_REDUCED = ("sum", "max", "min")


class Tile:
    """A loop over tiles of steps in place of one over steps. Row i of a tile is the i-th of its steps."""

    def __init__(self, g: Graph, loop: For, steps: int) -> None:
        self.g, self.steps, self.fresh = g, g.const(steps), g.count
        assert loop.region.bounds is not None and loop.region.iv is not None
        assert loop.region.parent is not None
        lo, hi, _ = loop.region.bounds
        with g.at(loop.region.parent):
            count = g.sub(hi, lo)
            self.region = g.loop_region(g.const(0), count, self.steps, loop.region.call, loop.region.line)
        first = self.region.iv
        assert first is not None
        self.named(first, "first")
        with g.at(self.region):
            rows = g.make("arange", (g.const(0), self.steps), {}, "int32", (self.steps,))
            self.rows = self.named(rows, "rows")
            number = g.sub(g.sub(hi, g.one), g.add(first, self.rows))
            hint = f"{loop.region.iv.hint or 'i'}_steps"  # no loop's own variable is called so
            self.number = self.named(self._typed(number, loop.region.iv), hint)
            self.inside = self.named(g.compare(">=", self.number, lo), "inside")
            self.begins = g.compare("==", self.rows, g.const(0))
            self.earlier = self._typed(g.add(self.number, g.one), loop.region.iv)
            self.follows = self.named(g.both(g.compare(">", self.rows, g.const(0)), self.inside), "follows")
            ends = g.both(g.compare("==", self.rows, g.const(steps - 1)), self.inside)
            self.last = self.named(g.make("or", (g.compare("==", self.number, lo), ends), {}, "int1"), "last")

    def named(self, node: Node, hint: str) -> Node:
        """What is there already keeps its name: drafts without tiles have it too."""
        if node.id > self.fresh and node.hint is None and node.op not in ("const", "full"):
            node.hint = hint
        return node

    def _typed(self, number: Node, like: Node) -> Node:
        return number if number.dtype == like.dtype else self.g.cast(number, like.dtype)

    def shape(self, shape: tuple) -> tuple:
        return (self.steps, *shape)

    def along(self, rows: Node, rank: int) -> Node:
        """What there is for each row, beside values of `rank` axes for each step."""
        for _ in range(rank):
            rows = self.g.expand(rows, len(rows.shape))
        return rows

    def wide(self, value: Node, tall: bool, shape: tuple) -> Node:
        """A value with all the rows and axes of a tile; `tall`: it has rows."""
        value = self.aligned(value, tall, len(shape))
        whole = self.shape(shape)
        return value if value.shape == whole else self.g.broadcast(value, whole)

    def aligned(self, value: Node, tall: bool, rank: int) -> Node:
        """A value as an operand among tiles with `rank` axes for each step."""
        if not tall and not value.shape:
            return value
        while len(value.shape) < rank + 1:
            value = self.g.expand(value, int(tall))
        return value


class Lifted:
    """What steps compute, for the steps with the numbers `number`, where `there` says that there are such."""

    def __init__(self, body: Body, tile: Tile, number: Node, there: Node) -> None:
        self.body, self.g, self.tile = body, body.g, tile
        self.number, self.there = number, there
        # The values that take carries, by what solves for them; where there is none, nothing may hang on one.
        self.taken: dict[Node, Callable[[], Node]] = {}
        self.made: dict[Node, tuple[Node, bool]] = {}
        self.branches: dict[If, If] = {}
        self.writes = False  # whether effects are made, or values alone
        self.largest = 1  # elements of a step's values, in the traced call

    def of(self, node: Node) -> tuple[Node, bool]:
        """A value, and whether it has rows."""
        if not self.body.is_inside(node):
            return node, False
        if node not in self.made:
            before, g = (self.g.reverse, self.g.line), self.g
            g.reverse, g.line = node.reverse, node.line
            try:
                with g.at(self.place(node.home)):
                    new, tall = self._of(node)
            finally:
                g.reverse, g.line = before
            if new.id > self.tile.fresh and new.op not in ("const", "full", "iv", "phi"):
                if tall and node.hint is None and (name := self._loaded(node)):
                    new.reverse = False  # a statement of its own: what takes it is long enough
                    new.hint = new.hint or name
                new.hint = new.hint or node.hint
                new.upstream = new.upstream or node.upstream
            if tall:
                self.largest = max(self.largest, self.g.elements(node.shape))
            self.made[node] = new, tall
        return self.made[node]

    def _loaded(self, node: Node) -> str | None:
        """The name of what is loaded, and converted at most."""
        users = self.body.users.get(node, [])
        if node.op == "load" and users and all(isinstance(u, Node) and u.op == "cast" for u in users):
            return None
        load = beneath(node, "cast")
        if load.op != "load" or not node.is_float:
            return None
        name = stem(load.args[0].attrs["name"])
        return gradient_name(name) if load.attrs.get("upstream") else name

    def place(self, region: Region) -> Region:
        """The loop over tiles, or a branch inside it."""
        if region is self.body.region:
            return self.tile.region
        if region.cond is None or region.parent is None:
            raise Stays
        cond, tall = self.of(region.cond)
        if tall:
            raise Stays
        with self.g.at(self.place(region.parent)):
            found = self.g.branch(cond, region.positive)
        found.skips = region.skips
        return found

    def _of(self, node: Node) -> tuple[Node, bool]:
        if node is self.body.region.iv:
            return self.number, True
        if node in self.taken:
            return self.taken[node](), True
        if node.op == "phi":
            if node not in self.body.loop.provides:
                raise Stays
            return self.of(self.body.loop.provides[node])
        if node.op == "ifout":
            return self._chosen(node)
        args = [self.of(arg) for arg in node.args]
        if (
            any(tall for _, tall in map(self.of, node.shape))
            or node.op == "load"
            and args[0][0].op != "param"
        ):
            raise Stays
        if not any(tall for _, tall in args):
            return self._uniform(node, [arg for arg, _ in args]), False
        if node.op == "load":
            return self._load(node, args), True
        return self._tall(node, args), True

    def _uniform(self, node: Node, args: list[Node]) -> Node:
        known = node.op in _UNIFORM or node.op in ("expand", "broadcast", "permute")
        summed = node.op == "reduce" and node.attrs["fn"] in _REDUCED
        if not known and not summed:
            raise Stays
        new = self.g.make(node.op, args, node.attrs, node.dtype, node.shape)
        return self._as_loaded(new, node)

    def _tall(self, node: Node, args: list[tuple[Node, bool]]) -> Node:
        g, shape, rank = self.g, self.tile.shape(node.shape), len(node.shape)
        value = args[0][0]
        if node.op == "expand":
            return g.expand(value, node.attrs["axis"] + 1)
        if node.op == "broadcast":
            return self.tile.wide(value, True, node.shape)
        if node.op == "permute":
            order = (0, *(at + 1 for at in node.attrs["order"]))
            return g.make("permute", (value,), {"order": order}, node.dtype, shape)
        if node.op == "reduce" and node.attrs["fn"] in _REDUCED:
            return g.reduce(node.attrs["fn"], value, node.attrs["axis"] + 1, dtype=node.dtype)
        if node.op not in _ALIKE:
            raise Stays
        aligned = [self.tile.aligned(arg, tall, rank) for arg, tall in args]
        return g.make(node.op, aligned, node.attrs, node.dtype, shape)

    def _load(self, node: Node, args: list[tuple[Node, bool]]) -> Node:
        """Rows beyond the end of the loop load nothing."""
        g, rank = self.g, len(node.shape)
        offset = self.tile.wide(*args[1], node.shape)
        mask = self._masked(args[2] if len(args) > 2 else None, rank)
        other = g.number(0) if node.is_float else g.const(0)
        if len(args) > 3:
            other = self.tile.aligned(*args[3], rank)
        attrs = {**node.attrs, "other": True}
        new = g.make(
            "load", (args[0][0], offset, mask, other), attrs, node.dtype, self.tile.shape(node.shape)
        )
        return self._as_loaded(new, node)

    def _as_loaded(self, new: Node, node: Node) -> Node:
        if new.op == "load":
            new.active, new.upstream = node.active, node.upstream
        return new

    def _masked(self, mask: tuple[Node, bool] | None, rank: int) -> Node:
        there = self.tile.along(self.there, rank)
        return there if mask is None else self.g.both(self.tile.aligned(*mask, rank), there)

    # branches

    def _chosen(self, node: Node) -> tuple[Node, bool]:
        old: If = node.attrs["if"]
        new = self.branch(old)
        found = [node.attrs[side] and self.of(node.attrs[side]) for side in ("then", "other")]
        tall = any(one is not None and one[1] for one in found)
        values: list[Node | None] = []
        for one, region in zip(found, (new.then, new.other), strict=True):
            with self.g.at(region):
                values.append(one and (self.tile.wide(*one, node.shape) if tall else one[0]))
        out = self.g.merged(new, values[0], values[1], node, self.place(node.home))
        out.shape = self.tile.shape(node.shape) if tall else node.shape
        return out, tall

    def branch(self, old: If) -> If:
        if old not in self.branches:
            cond, tall = self.of(old.cond)
            if tall or old.outer is None:
                raise Stays
            then, other = self.place(old.then), self.place(old.other)
            new = If(cond, then, other, [], [], self.place(old.outer), old.static, old.line)
            self.branches[old] = new
            if self.writes:
                new.then_effects = self.effects(old.then_effects)
                new.other_effects = self.effects(old.other_effects)
        return self.branches[old]

    # effects

    def effects(self, effects: list) -> list:
        return [self._effect(effect) for effect in effects]

    def _effect(self, effect: object) -> object:
        if isinstance(effect, If):
            return self.branch(effect)
        if not isinstance(effect, GradWrite) or effect.kind not in ("store", "atomic_add"):
            raise Stays
        if effect.base.op != "param":
            raise Stays
        with self.g.at(self.place(effect.region)):
            return self._write(effect)

    def _write(self, write: GradWrite) -> GradWrite:
        """Each step's write in a row of its own. What all steps add to one place they carry as a sum."""
        tile, shape = self.tile, write.offset.shape
        offset, value = self.of(write.offset), self.of(write.value)
        if not offset[1]:
            raise Stays
        masked = self._masked(None if write.mask is None else self.of(write.mask), len(shape))
        wide = [tile.wide(*one, shape) for one in (offset, value, (masked, True))]
        region = self.place(write.region)
        return replace(write, offset=wide[0], value=wide[1], mask=wide[2], region=region)

    def summed(self, value: Node, tall: bool, like: Node) -> Node:
        """The sum over the steps of a tile that there are, of what one step has as `like`."""
        g, tile = self.g, self.tile
        wide = tile.named(tile.wide(value, tall, like.shape), "d_steps")
        there = tile.along(self.there, len(like.shape))
        return g.reduce("sum", g.where(there, wide, g.number(0)), 0, dtype=like.dtype)

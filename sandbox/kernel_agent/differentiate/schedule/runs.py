"""Sums for what a table tells, of runs of entries that name the same.

    expert = tl.load(table_ptr + tl.program_id(0))        each program adds to w[expert]

    for entry in range(first, last):                      each program walks entries that follow each other
        expert = tl.load(table_ptr + entry)
        if expert != expert_before:
            tl.atomic_add(d_w_ptr + expert_before * ..., d_w_sum)
            d_w_sum = 0
        d_w_sum += tl.dot(...)
        expert_before = expert
    tl.atomic_add(d_w_ptr + expert_before * ..., d_w_sum)

Entries of one expert, segment or relation mostly stand side by side. Nothing of that is taken to be so: in a
table in any order there are more atomic adds, of the same sums. How many programs share the entries of a tile
out is for the tuner. The rest of the address, loops of the forward too, is the grid.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from ...source import words
from ..ir.graph import Graph
from ..ir.names import adjoint_name
from ..ir.nodes import HALF, Carry, For, GradWrite, Node, Region, nodes_in, reachable, real
from ..ir.values import loop_out
from ..prove.affine import Affine
from ..prove.masks import parts as conditions
from .nests import Nest, Part
from .partials import bytes_text

if TYPE_CHECKING:
    from .owner import Owner

# Triton 3.6 loads what n loads tell one after another (k - 1) // n turns ahead in k stages.
AHEAD = 2
SHARED = 224 << 10  # bytes that a program may have on sm_90, but for some numbers
_CHANGING = words("phi iv loopout ifout random dot reduce scan combine fold call pid vpid")


@dataclass(frozen=True)
class Run:
    """The variable of programs that numbers entries, and what each loads that an address hangs on."""

    number: Node
    indices: tuple[Node, ...]

    @property
    def called(self) -> str:
        """The indices, for people."""
        return ", ".join(f"`{n.hint or 'index'}`" for n in self.indices)


def part(owner: Owner, write: GradWrite, loops: tuple[For, ...]) -> Part | None:
    """A write of a product where an index says that programs along one axis load; None if it is none."""
    table, programs = owner.programs.table, owner.programs
    regions = [region for region in write.region.chain() if region.kind != "top"][::-1]
    inside = list(reachable([write.offset], lambda n: [] if n.op == "load" or n in table else n.args))
    indices = sorted((n for n in inside if n.op == "load"), key=lambda n: n.id)
    rest = [n for n in inside if n.op != "load"]
    numbers = _numbers(owner, indices)
    own = {v for n in rest if n in table for v in programs.of(n)}
    ivs = {n for n in rest if n.op == "iv"}
    trips = [loop.region for loop in loops if loop.region.iv in ivs]
    reduced = tuple(region for region in regions if region.iv not in ivs)
    if (
        owner.walk is not None
        or len(numbers) != 1
        or numbers & own
        or any(n.op in _CHANGING and n not in table and n not in ivs for n in rest)
        or any(region.cond is not None for region in regions)
        or not any(n.op == "dot" for n in nodes_in([write.value]))
        or not all(_counted(owner, region) for region in trips)
    ):
        return None
    owned = tuple(v for v in programs.virtual if v in own)
    if any(owner.varies(condition, owned, reduced) for condition in conditions(write.mask)):
        return None
    (number,) = numbers
    steps = [(region.bounds[2], region) for region in trips if region.bounds is not None]
    others = [v for v in programs.virtual if v is not number]
    found = Part(write, tuple(regions), owned, steps, reduced, [], virtual=(number, *others))
    found.run = Run(number, tuple(indices))
    return found


def _numbers(owner: Owner, indices: Iterable[Node]) -> set[Node]:
    """The variables of programs that indices hang on, if on nothing else."""
    table, found = owner.programs.table, set[Node]()
    for index in indices:
        inside = list(reachable([index], lambda n: [] if n in table else n.args))
        numbers = {v for n in inside if n in table for v in owner.programs.of(n)}
        plain = all(n in table or n.op not in _CHANGING and not n.attrs.get("buffer") for n in inside)
        if index.shape or index.is_float or index.home is not owner.g.top or not plain or len(numbers) != 1:
            return set()
        found |= numbers
    return found


def _counted(owner: Owner, region: Region) -> bool:
    """Whether the host knows how many steps a loop has at most, which begin in one place."""
    bounds, affine = region.bounds, Affine(owner.g)
    if bounds is None or owner.most(bounds[1], False) is None:
        return False
    return affine.uniform(bounds[0]) and affine.uniform(bounds[2])


class RunNest(Nest):
    """The loops of such a kernel. `effects`: what it does, once `totals` are made."""

    effects: list

    @property
    def run(self) -> Run:
        run = self.parts[0].run
        assert run is not None
        return run

    def steps(self, v: Node, first: bool) -> tuple[Node, Node, Node]:
        """Of the entries, those of a program follow each other."""
        if v is not self.run.number:
            return super().steps(v, first)
        assert self.splits is not None
        g, count = self.g, self.owner.count(v)
        share = g.make("cdiv", (count, g.intern("npid", (), self.splits.attrs, "int32", ())))
        start = self.named(g.mul(self.splits, self.named(share, "entries")), "first")
        return start, self.named(g.make("minimum", (g.add(start, share), count)), "last"), g.one

    def all_addresses(self) -> list[tuple[Node, Node | None]]:
        return []  # they change from entry to entry

    def _nest(self, depth: int, accs: list[Node]) -> list[Node]:
        region, g = self.levels[depth][1] if depth < len(self.levels) else None, self.g
        if region is None or region.iv is not self.actual[self.run.number]:
            return super()._nest(depth, accs)
        assert region.parent is not None and region.bounds is not None
        loop = For(region, region.parent, order="forward", line=region.line)
        masks = [self.store_mask(part.write) for part in self.parts]
        with g.at(g.top):
            last = g.sub(self.owner.count(self.run.number), g.one)
            entry = g.make("minimum", (region.bounds[0], last))
        inits = [self._of_entry(index, entry) for index in self.run.indices]
        names = [adjoint_name(part.write.base.attrs["name"]) for part in self.parts]
        sums = [g.adjoint_carry(f"{n}_sum", a, region) for n, a in zip(names, accs, strict=True)]
        before = [_carry(g, init, region) for init in inits]
        now = [self.node(index) for index in self.run.indices]
        with g.at(region):
            pairs = zip(now, before, strict=True)
            changed = reduce(lambda a, b: g.make("or", (a, b)), (g.compare("!=", a, b) for a, b in pairs))
            stmt = g.fork(changed, static=False)
        kept = []
        for part, mask, total in zip(self.parts, masks, sums, strict=True):
            stmt.then_effects.append(self._added(part.write, before, total, mask, stmt.then))
            with g.at(stmt.then):
                zeros = g.zeros(total.shape, total.dtype)
            kept.append(g.merged(stmt, zeros, total, total, region))
        with g.at(region):
            nexts = self._nest(depth + 1, kept)
        loop.effects = [stmt]
        every = zip([*sums, *before], [*accs, *inits], [*nexts, *now], strict=True)
        loop.carries = [Carry(phi, init, new) for phi, init, new in every]
        outs = [loop_out(g, loop, k) for k in range(len(loop.carries))]
        totals, ends = outs[: len(accs)], outs[len(accs) :]
        inner = [one for kind, one in self.levels[depth + 1 :] if kind == "loop"]
        region.stages = "" if inner else _stages(g, region, nexts)
        for out in totals:
            out.upstream = True
        self.effects = [loop]
        for part, mask, total in zip(self.parts, masks, totals, strict=True):
            self.effects.append(self._added(part.write, ends, total, mask, g.top))
        return totals

    def _of_entry(self, index: Node, entry: Node) -> Node:
        """What an entry loads, outside of the loop over them."""
        at = self.actual[self.run.number]
        self.actual[self.run.number] = entry
        new = self.at_top(index)
        self.actual[self.run.number] = at
        return new

    def _added(
        self, write: GradWrite, indices: list[Node], total: Node, mask: Node | None, region: Region
    ) -> GradWrite:
        """The addition of a sum at the address that these indices tell."""
        known = dict(zip(self.run.indices, indices, strict=True))
        offset = self.at_top(write.offset, known, region)
        return GradWrite(write.base, offset, mask, total, region, write.line)


def _stages(g: Graph, region: Region, values: list[Node]) -> str:
    """How many turns ahead to load. A turn's rows are told by what it loads before: each of those loads has
    as many turns, so that products have their operands `AHEAD` turns ahead."""
    loads = [n for n in nodes_in(values) if n.op == "load" and n.home.inside(region)]
    behind: dict[Node, int] = {}

    def length(node: Node) -> int:
        if node not in behind:
            loaded = node.op == "load" and node.home.inside(region)
            behind[node] = loaded + max(map(length, node.args), default=0)
        return behind[node]

    chain = max(map(length, loads), default=0)
    wide = [n for n in loads if sum(not g.is_one(dim) for dim in n.shape) > 1]
    blocks = [(n.shape, (AHEAD + 1) * (2 if real(n.dtype) in HALF else 4)) for n in wide]
    held = bytes_text(g, [*blocks, *((value.shape, 4) for value in values)])
    return f"{AHEAD * chain + 1} if {held} <= {SHARED} else None" if held and chain > 1 else ""


def _carry(g: Graph, init: Node, region: Region) -> Node:
    """The index of the entry before."""
    hint = f"{init.hint or 'index'}_before"
    new = g.fresh("phi", {"name": hint}, init.dtype, (), region)
    new.hint, new.reverse = hint, True
    return new

"""Owner-computes: give a gradient that many programs add to a kernel in which one program owns each tile.

A gradient write sums over the program ids and loop variables that its address does not contain. In the kernel
made here the variables of the address are the grid and the others are loops; forward values are recomputed
for each tile, except those that took a loop of their own: the main kernel spills them, a few numbers a
program. Where a tile would leave the device idle (no product of blocks in it), the outermost sum is split
among several programs that store partial sums, and the host adds those up.

An address that mixes a position with taps, or holds only some digits of a position, is turned around first
(`windows`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import readable
from ..ir.counts import longest
from ..ir.names import adjoint_name, stem
from ..ir.nodes import For, GradWrite, Node, Region, Store, bodies, nodes_in, operands, placed, reachable
from ..ir.report import Why
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_number, is_zero
from ..ir.values import is_static, takes_loop
from ..prove import packed, stored_rows
from ..prove.affine import Affine, Group, Var, upper
from ..prove.cover import reached
from ..prove.disjoint import asks_flags, close, determined, layouts_of, learn, overlaps
from ..prove.masks import parts as conditions
from ..prove.positions import NotTurned
from ..read.block_sizes import Grid
from ..reverse.sweep import Reverse
from ..reverse.sweep import writes as every_write
from . import runs, sunk_sums, tile_queues
from .gradient_writes import depends
from .kept_values import Spills
from .nests import Nest, NotOwned, Part
from .operands import Operand, Operands
from .programs import program_variables
from .tile_queues import Walk
from .windows import Turned, turn, windowed

PROGRAMS = 128  # about one on each multiprocessor
LONG = 256  # steps of a walk over programs that few owners make each


@dataclass
class OwnerKernel:
    """One generated kernel: its effects, its grid as nodes for the host, and what it writes."""

    name: str
    effects: list
    grid: list[Node]
    bases: list[str]
    split: bool = False
    few: bool = False  # a sum of products, which may be split too where its tiles are few
    optional: bool = False  # written under a condition known at compile time: the gradient may be None
    shared: Node | None = None
    equal: list[tuple[Node, Node]] = field(default_factory=list)  # counts that it has to find equal
    positive: list[Node] = field(default_factory=list)  # factors that the host has to find above zero
    layouts: list[list] = field(default_factory=list)
    asked: list[packed.Asked] = field(default_factory=list)  # of tensors
    ordered: dict[str, int | None] = field(default_factory=dict)  # tensors that bound groups, and their least
    notes: list[str] = field(default_factory=list)  # what stands above it
    operands: list[Operand] = field(default_factory=list)  # that kernels in front of it compute
    entries: Node | None = None  # how many its programs walk, which add to its gradients atomically
    warps: int | None = None  # where it has others than all, and stages


class Owner:
    """Moves eligible atomic writes of one reverse sweep to kernels of their own."""

    def __init__(
        self,
        reverse: Reverse,
        axes: list[int],
        name: str,
        grid: tuple[int, ...],
        products: bool = False,
        walk: Walk | None = None,
        own: Grid | None = None,
        operands: bool = False,
        stored: bool = False,
        runs: bool = False,
    ) -> None:
        """`products`: split also the sums of products of blocks, for few tiles with long sums. `walk`: move
        the writes of its tiles, and no others. `own`: tiles that each kernel may have others than.
        `operands`: compute those of products once, in front of it, where more than one program would.
        `stored`: take rows to be disjoint that an output's stores keep apart. `runs`: walk entries of a
        table that name the same."""
        self.walk, self.prepares, self.stored, self.runs = walk, operands, stored, runs
        self.could_prepare = False  # whether there are any such operands
        self.could_own = self.could_run = False  # whether there are any such rows or entries
        axes = [axis for axis in axes if walk is None or axis != walk.axis]
        self.reverse, self.kernel, self.g = reverse, reverse.kernel, reverse.kernel.graph
        self.name, self.grid, self.products = name, grid, products
        self.programs = program_variables(self.kernel, reverse.effects, axes)
        self.spills = Spills(reverse, self.programs, self.grid_param, walk is not None, own)
        self.refused: dict[Node, str] = {}  # gradients that keep their writes, and why
        self.kernels: list[OwnerKernel] = []
        self.reached: set[Region] = set()  # loops of which a queue has the steps that there are alone
        self.divisible = list(self.programs.divisible)  # sizes that the host has to find divisible
        table = self.programs.table | {node: node for node in self.spills.won}  # kept as they are
        self.tiles = Rewriter(self.g, table.get)

    def run(self) -> Owner:
        bases: dict[Node, list[tuple[GradWrite, tuple[For, ...]]]] = {}
        for write, loops in placed(self.reverse.effects, GradWrite):
            found = (write, loops) if self.walk is None else self.walk.writes.get(id(write), (write, loops))
            bases.setdefault(write.base, []).append(found)
        groups: dict[tuple, list] = {}
        for base, writes in bases.items():
            if any(w.kind != "store" for w, _ in writes):
                plan = self.plan(base, writes)
                if getattr(plan, "kind", "") == "mixed":
                    plan = self.with_strides(base, writes, plan)
                if isinstance(plan, str):
                    self.refuse(base, writes[0][0].line, plan)
                else:
                    groups.setdefault(plan.key, []).append(plan)
        for plans in groups.values():
            if plans[0].parts[0].run is None:
                self.build(plans)
            else:
                self.build_runs(plans)
        return self

    def refuse(self, base: Node, line: int | None, why: str) -> None:
        self.refused[base] = why
        self.reverse.say(line, "owner", "none", f"gradient of {base.attrs['name']}: {why}")

    # what a base needs

    def with_strides(self, base: Node, writes: list, found: Plan | str) -> Plan | str:
        """A plan in which constexprs that can be strides are, as `disjoint` takes them; else what was
        found."""
        affine, known, before = Affine(self.g, absolute=True), self.g.strides, self.spills.state()
        strides = [i for w, _ in writes for i in affine.strides(self.tiles.node(w.offset))]
        named = [affine.nodes[i] for i in strides if affine.nodes[i].op == "constexpr"]
        self.g.strides = known | {node.attrs["name"] for node in named}
        plan = self.plan(base, writes) if named else found
        self.g.strides = known
        if isinstance(plan, str):
            self.spills.restore(before)
            return found
        return plan

    def plan(self, base: Node, writes: list) -> Plan | str:
        if self.walk is not None and any(id(w) not in self.walk.origins for w, _ in writes):
            return Why("carry", "its value depends on what the loop carries")
        needed = [n for w, _ in writes for n in nodes_in([w.value])]
        if base.attrs["name"] in self.kernel.inplace:
            return Why("inplace", "it takes the place of an upstream gradient, which is passed on elsewhere")
        dots = any(n.op == "dot" for n in needed)
        parts: list[Part] = []
        for write, loops in writes:
            part = self.part(write, loops)
            if getattr(part, "kind", "") == "data" and len(writes) == 1:
                part = self._of_run(write, loops) or part
            if isinstance(part, str):
                return part
            parts.append(part)
        if self.walk is None and len(parts) > 1 and len({self.tiles.node(w.offset) for w, _ in writes}) > 1:
            before = self.spills.state()
            shifted = [p for p in (self.turned(w, loops, True) for w, loops in writes) if isinstance(p, Part)]
            if len(shifted) == len(parts):
                parts = shifted
            else:
                self.spills.restore(before)
        first = parts[0]
        if any((part.turned is None) != (first.turned is None) for part in parts):
            return Why("several", "only some of its writes are windows")
        for part in parts[1:]:
            if part.own != first.own or [s for s, _ in part.trips] != [s for s, _ in first.trips]:
                return Why("shared", "its writes own different tiles")
        paths = tuple((p.path, p.reduced) for p in parts)
        steps, turned = tuple(s.id for s, _ in first.trips), first.turned and id(first.turned)
        key = (first.own, paths, steps, dots, turned, first.run)
        return Plan(base, parts, len(parts) > 1, key, dots)

    def _of_run(self, write: GradWrite, loops: tuple[For, ...]) -> Part | None:
        """What walks entries of a table for a write, where that is asked for."""
        found = runs.part(self, write, loops)
        self.could_run |= found is not None
        return found if self.runs else None

    def part(self, write: GradWrite, loops: tuple[For, ...]) -> Part | str:
        """What owns a write: a tile of its address as it is, or of the window that it is turned into."""
        found = self.nest(write, loops)
        if self.walk is not None:
            return found
        if isinstance(found, Part):
            if not windowed(self.g, self.programs, self.tiles, self.grid, write):
                return found
        elif getattr(found, "kind", "") not in ("mixed", "overlap", "lanes"):
            return found
        part = self.turned(write, loops)
        if isinstance(part, Part):
            return part
        return found if isinstance(found, Part) else Why(found.kind, f"{found}; as a window: {part}")  # type: ignore[attr-defined]

    def turned(self, write: GradWrite, loops: tuple[For, ...], shifted: bool = False) -> Part | str:
        """What owns the window of a write, turned around."""
        before = self.spills.state()
        try:
            found = turn(self.g, self.programs, self.tiles, self.grid, write, self.spills.read, shifted)
            part = self.nest(found.write, loops, found)
        except NotTurned as failure:
            part = failure.why
        if not isinstance(part, Part):
            self.spills.restore(before)
        return part

    def nest(self, write: GradWrite, loops: tuple[For, ...], turned: Turned | None = None) -> Part | str:
        """The affine nest of a write, or why it is none."""
        if any(loop.order == "reverse" or loop.region.kind != "for" for loop in loops):
            return Why("reverse", "its loop runs backwards or has no bounds")
        phis = {c.phi for loop in loops for c in loop.carries}
        phis |= {c.phi for loop in loops if loop.source for c in loop.source.carries}
        if depends(write.value, phis):
            return Why("carry", "its value depends on what the loop carries")
        if not self.computable(write):
            return Why("inner", "its value comes out of an inner loop")
        affine = Affine(self.g, absolute=True)
        found = self.address(affine, write)
        if isinstance(found, str):
            return found
        groups, known = found.groups, found.known
        lanes = {var.key[0] for group in found.every for var, _ in group.terms if var.kind == "lane"}
        virtual = self.programs.virtual if turned is None else turned.virtual
        for number, variables in turned.facts if turned is not None else ():
            if (number.op, (number.id,)) in known:
                known |= {(var.kind, var.key) for var in variables}
                lanes |= {var.key[0] for var in variables if var.kind == "lane"}
        if any(axis not in lanes and not self.g.is_one(dim) for axis, dim in enumerate(write.offset.shape)):
            return Why("lanes", "several lanes of a block go to one address")
        own = tuple(v for v in virtual if ("vpid", (v.attrs["axis"],)) in known)
        for item in nodes_in([self.tiles.node(write.offset)]):
            if item.op == "vpid" and item not in own:
                return Why("mixed", f"its address depends on `{item.hint}` without determining it")
        trips = [loop.region for loop in loops if ("trip", (id(loop.region),)) in known]
        regions = [r for r in write.region.chain() if r.kind != "top"][::-1]
        gone = turned.gone if turned is not None else set()
        reduced = tuple(r for r in regions if r.is_loop and r not in trips and r not in gone)
        if any(r.iv in set(reachable([write.offset])) for r in reduced):
            return Why("mixed", "its address depends on a loop without determining it")
        queued = self.walk is not None and self._queued(trips)
        for region in trips:
            if not queued and self.most(region.bounds[1], bool(found.asked)) is None:  # type: ignore[index]
                return Why("bounds", "the length of its loop is not known before the launch")
            lo, _, step = region.bounds  # type: ignore[misc]
            if not affine.uniform(step):
                return Why("bounds", "its loop has a step that differs between programs")
            if not affine.uniform(lo) and not self._aligned(lo, step):
                return Why("bounds", "its loop starts at different places in different programs")
        moved = turned.axes if turned is not None else set()
        mask: Node | None = None
        for condition in conditions(write.mask):
            if not self.varies(condition, own, reduced):
                mask = self.g.both(mask, self.tiles.node(condition))
            elif any(not self.g.is_one(d) for at, d in enumerate(condition.shape) if at not in moved):
                why = "which lanes it writes differs between the programs that are summed over"
                return Why("extent", why)
        # The owner stores whatever branches say, a sum of nothing too: what bounds rows has to be its mask.
        if found.asked and self.packed(affine, write, mask).terms() != {frozenset(g.terms) for g in groups}:
            return Why("data", "its mask alone, as its owner has it, does not bound its rows")
        if found.stored is not None and not self._of_stored_rows(affine, replace(write, mask=mask)):
            return Why("data", "its mask alone, as its owner has it, does not tell its rows apart")
        tile = self.tiles.node(write.offset)
        layouts = layouts_of(affine, self.g, groups, mask, len(tile.shape))
        if layouts is None:
            return Why("extent", "the extents of its address dimensions are not known")
        if any(overlaps(self.g, layout, self.grid) for layout in layouts):
            return Why("overlap", "its windows overlap: one element is read at several places")
        steps = [(region.bounds[2], region) for region in trips]  # type: ignore[index]
        covers = None
        if not found.asked and not any(r.cond is not None for r in regions):
            covers = reached(affine, self.g, groups, tile, mask)
            covers = turned.covers if covers is None and turned is not None else covers
        part = Part(write, tuple(regions), own, steps, reduced, layouts, covers, tuple(virtual), turned)
        part.asked, part.stored = found.asked, found.stored
        return part

    def most(self, end: Node, data: bool = True) -> Node | None:
        """The greatest end of a loop in any program: of its value or, with `data`, of what the host finds."""
        known = upper(self.g, end)
        return longest(self.g, end) if known is None and data else known

    def address(self, affine: Affine, write: GradWrite) -> Address | str:
        """The dimensions of a write's address, and what they determine; or why nothing owns it."""
        groups = affine.groups(self.tiles.node(write.offset))
        if groups is None:
            return Why("mixed", "its address is not a sum of strides times indices")
        named = [var.node for group in groups for var, _ in group.terms if var.node is not None]
        data = next((n for node in named for n in nodes_in([node]) if n.op == "load"), None)
        if data is not None:
            of_rows = self._of_rows(affine, write, data)
            return of_rows if isinstance(of_rows, Address) else self._of_stored_rows(affine, write) or of_rows
        known: set = set()
        for group in groups:
            if not affine.solve(group) or any(var.kind == "opaque" for var, _ in group.terms):
                names = ", ".join(sorted({_name(var) for var, _ in group.terms}))
                return Why("mixed", f"its address mixes indices ({names}) in one dimension")
            for var, _ in group.terms:
                learn(var, known)
        close(affine, known, groups)
        return Address(groups, known, groups)

    def packed(self, affine: Affine, write: GradWrite, mask: Node | None) -> packed.Packed:
        """The rows of packed sequences in an address, as far as `mask` bounds them."""
        groups = affine.groups(self.tiles.node(write.offset)) or []
        return packed.rows(affine, groups, mask, len(write.offset.shape), None)

    def _of_rows(self, affine: Affine, write: GradWrite, data: Node) -> Address | str:
        """The same of rows that are found in data, where sequences are packed."""
        where = f" (`{data.hint or stem(data.args[0].attrs['name'])}` of line {data.line})"
        no = Why("data", f"its address depends on data{where}")
        mask = None if write.mask is None else self.tiles.node(write.mask)
        rows = self.packed(affine, write, mask)
        if not rows.asked or asks_flags(mask, len(write.offset.shape)):
            return no
        every = rows.groups + rows.behind
        known = determined(affine, every)
        if not packed.programs(affine, rows, known):
            return no
        close(affine, known, every)
        named = [var.node for group in rows.groups for var, _ in group.terms if var.node is not None]
        if any(n.op == "load" for n in nodes_in(named)):
            return no
        if not all(group.solved for group in every):
            return Why("mixed", f"{no}, and mixes indices in one dimension")
        for asked in (one for one in rows.asked if isinstance(one, packed.Distinct)):
            if self.programs.table.get(self.g.pid(asked.axis)) not in self.programs.virtual:
                return no  # the table is not read by the programs of an axis as they are
        # A batch of packed sequences is one: other programs would store the same rows in the forward, too.
        plain = Affine(self.g)
        whole = packed.Packed(plain.groups(write.offset) or [], asked=rows.asked)
        for axis in (axis for axis in range(len(self.grid)) if self.walk is None or axis != self.walk.axis):
            packed.alone(plain, whole, set(), axis, self.grid)
        return Address(rows.groups, known, every, rows.asked)

    def _of_stored_rows(self, affine: Affine, write: GradWrite) -> Address | None:
        """The same of rows that the stores of an output keep apart, where that is asked for."""
        mask = None if write.mask is None else self.tiles.node(write.mask)
        offset = self.tiles.node(write.offset)
        found = None
        if self.walk is None:
            found = stored_rows.find(self.kernel, affine, self.tiles, offset, mask)
        self.could_own |= found is not None
        if found is None or not self.stored:
            return None
        every = found.groups + found.behind
        known = determined(affine, every)
        close(affine, known, every)
        solved = all(group.solved for group in every)
        return Address(found.groups, known, every, stored=found.store) if solved else None

    def computable(self, write: GradWrite) -> bool:
        """Whether another kernel can have what a write needs: no carries, loops only behind whole values."""
        stack, seen = [n for n in (write.value, write.offset, write.mask) if n is not None], set()
        spilled = self.spills.names()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if self.spills.able(node) and takes_loop(node):
                continue
            if node.op in ("phi", "loopout"):
                return False
            stored = node.attrs.get("saved") or node.attrs.get("matrix")
            taped = node.op == "load" and node.attrs.get("buffer") and not stored
            if taped and node.args[0].attrs["name"] not in spilled:
                return False
            stack += [n for n in operands(node) if isinstance(n, Node)]
            if node.op == "iv":
                stack += list(node.home.bounds or ())
        return True

    def _aligned(self, lo: Node, step: Node) -> bool:
        """Whether a start is a multiple of the step, if block sizes divide each other: the host checks it."""
        factor = next((x for x in lo.args if lo.op == "mul" and x.op in ("const", "constexpr")), None)
        if factor is None:
            return False
        a, b = self.g.concrete(factor), self.g.concrete(step)
        if not (isinstance(a, int) and isinstance(b, int) and b > 0 and a % b == 0):
            return False
        self.divisible.append((factor, step))
        return True

    def varies(self, node: Node, own: tuple[Node, ...], reduced: tuple[Region, ...]) -> bool:
        """Whether a value depends on something that an owner sums over."""
        ivs = {region.iv for region in reduced}
        table = self.programs.table

        def parts(item: Node) -> list[Node]:
            return [] if item in table else [n for n in operands(item) if isinstance(n, Node)]

        def differs(item: Node) -> bool:
            if item in table:
                return not self.programs.of(item) <= set(own)
            if item.op in ("pid", "loopout", "phi") or item in ivs:
                return True
            if item.op == "load" and self.walk is not None and item.home is self.walk.steps:
                return False  # what every program loads in each step: it hangs on its address alone
            return item.op == "vpid" and item not in own or item.op == "load" and item.home is not self.g.top

        return any(map(differs, reachable([node], parts)))

    # the kernel

    def _label(self, plans: list[Plan]) -> str:
        """What a kernel is called by."""
        label = "_".join(p.base.attrs["name"].removesuffix("_ptr").lower() for p in plans)
        while any(made.name == f"{self.name}_{label}" for made in self.kernels):  # of w beside W
            label += "_"
        return label

    def build_runs(self, plans: list[Plan]) -> None:
        """A kernel whose programs walk entries of a table."""
        label, part = self._label(plans), plans[0].parts[0]
        sizes = [self._trips(plans[0], i) for i in range(len(part.trips))]
        own, grid, share = self._grid(label, part, sizes, True, False)
        operands = Operands(self.g, f"{self.name}_{label}", grid, self.in_kernel, False, self.grid)
        nest = runs.RunNest(self, [plan.parts[0] for plan in plans], own, False, share, operands)
        nest.totals()
        made = OwnerKernel(f"{self.name}_{label}", nest.effects, grid, [p.base.attrs["name"] for p in plans])
        made.entries = nest.run.number.attrs["count"]
        names, index = ", ".join(map(adjoint_name, made.bases)), nest.run.called
        made.notes = [f"one program sums a tile of {names} over a run of entries, until {index} changes"]
        for plan in plans:
            self._remove(plan)
            reason = f"summed over entries that follow each other, added atomically where {index} changes"
            d = adjoint_name(plan.base.attrs["name"])
            self.reverse.say(plan.parts[0].write.line, "owner", "any order of entries", f"{d}: {reason}")
        self.kernels.append(made)

    def build(self, plans: list[Plan]) -> None:
        g, first = self.g, plans[0]
        label = self._label(plans)
        virtual, turned = first.parts[0].virtual, first.parts[0].turned
        shared = next((v for v in virtual if v not in first.parts[0].own), None)
        trips = first.parts[0].trips
        queued = self.walk is not None and self._queued([region for _, region in trips])
        self.reached = {region for _, region in trips if queued and not first.absolute}
        sizes = [] if queued else [self._trips(first, i) for i in range(len(trips))]
        idle = self._idle([*sizes, *(v.attrs["count"] for v in first.parts[0].own)])
        # A window has as many tiles as what it gathers from, and its copies would be as large.
        small = turned is None or (not turned.window and idle)
        few = small and first.dots and shared is not None and idle and self.walk is None
        split = (small and not first.dots) or (few and (self.products or self._long(shared)))
        split = split and self.walk is None  # what is summed over are loops
        why = None
        if split and all(v in first.parts[0].own for v in virtual):
            why = "its address determines every program id: there is no axis to sum over"
        elif not trips and not first.parts[0].own and not split:
            why = "its address determines no program id: one program would own all of it"
        if why is not None:
            self._leave(plans, Why("shared", why))
            return

        own, grid, splits = self._grid(label, first.parts[0], sizes, split, queued)
        operands = Operands(g, f"{self.name}_{label}", grid, self.in_kernel, self.prepares, self.grid)
        nests = [
            Nest(self, [plan.parts[n] for plan in plans], own, first.absolute, splits, operands)
            for n in range(len(first.parts))
        ]
        apart = {plan.base for k, plan in enumerate(plans) if len({nest.addresses[k] for nest in nests}) > 1}
        if apart:
            different = Why("several", "its writes go to different addresses")
            self._leave([p for p in plans if p.base in apart], different)
            if len(apart) < len(plans):
                self.build([p for p in plans if p.base not in apart])
            return
        totals = self._totals(nests)
        if isinstance(totals, str):
            self._leave(plans, totals)
            return
        totals = sunk_sums.sink(g, totals)
        made = OwnerKernel(f"{self.name}_{label}", [], grid, [p.base.attrs["name"] for p in plans], split)
        static = [r for r in first.parts[0].path if r.cond is not None and is_static(r.cond)]
        made.optional = bool(static) and len(first.parts) == 1
        made.shared, made.few, made.operands = shared, few, [*operands.made.values()]
        self.could_prepare |= operands.offered
        windows = [part.turned for plan in plans for part in plan.parts if part.turned is not None]
        made.equal = list(dict.fromkeys(pair for window in windows for pair in window.equal))
        made.positive = list(dict.fromkeys(factor for window in windows for factor in window.positive))
        for plan, summed in zip(plans, totals, strict=True):
            write = plan.parts[-1].write
            offset, mask = nests[-1].addresses[plans.index(plan)]
            effect = GradWrite(write.base, offset, mask, summed, g.top, write.line, "store")
            if len(plan.parts) == 1 and not made.optional:  # of a copy, where every split has one
                effect.covers = plan.parts[0].covers
            if splits is not None:  # every split has a copy of its own, which the host adds up
                span = g.param(f"span_{write.base.attrs['name']}")
                effect.offset = g.add(g.mul(g.cast(splits, "int64"), span), offset)
            made.effects.append(self._guarded(effect, first, nests[-1]) if made.optional else effect)
            made.layouts += [layout for p in plan.parts for layout in p.layouts]
            made.asked += [asked for p in plan.parts for asked in p.asked]
            self._remove(plan)
            reason = f"owned tiles: {'partial sums of ' if split else ''}one program a tile"
            proof = "affine nest" if turned is None else turned.what
            proof = proof if self.walk is None else "every tile once"
            reason += stored_rows.said(plan.parts[0].stored)
            d = adjoint_name(plan.base.attrs["name"])
            self.reverse.say(write.line, "owner", proof, f"{d}: {reason}")
        for one in made.operands:
            size = readable(one.bytes(g, self.grid), "B", 2)
            reason = f"`{one.called}`: computed once, in front of its products: {size} of scratch"
            self.reverse.say(one.line, "operand", "none", reason)
        made.notes = [self._note(made, first)]
        if self.walk is not None:
            self._in_order(made, self.walk)
            if queued:
                self._walked(made, own, first.parts[0], self.walk)
        self.kernels.append(made)

    def _totals(self, nests: list[Nest]) -> list[Node] | Why:
        """What gradients sum up to; or why a kernel of their own cannot compute that."""
        before = self.spills.state()
        try:
            totals = nests[0].totals()
            for nest in nests[1:]:
                totals = [self.g.add(one, more) for one, more in zip(totals, nest.totals(), strict=True)]
        except NotOwned as failure:
            self.spills.restore(before)
            return Why("inner", str(failure))
        return totals

    def _grid(
        self, label: str, part: Part, sizes: list[Node], split: bool, queued: bool
    ) -> tuple[dict[Any, Node], list[Node], Node | None]:
        """What stands for each variable that a kernel owns, its grid, and the share of a split. `sizes`: of
        the loops. `queued`: there is no grid, as a queue takes the place of these numbers."""
        g, own, grid = self.g, dict[Any, Node](), list[Node]()

        def axis(count: Node) -> Node:
            grid.append(count)
            return g.intern("pid", (), {"axis": len(grid) - 1, "kernel": label}, "int32", ())

        if queued:
            hints = {
                ("trip", i): getattr(region.iv, "hint", None) for i, (_, region) in enumerate(part.trips)
            }
            for at, (key, hint) in enumerate([*hints.items(), *((v, v.hint) for v in part.own)]):
                own[key] = g.intern("pid", (), {"axis": at, "kernel": label}, "int32", ())
                own[key].hint = hint
            return own, grid, None
        counts = [Axis(("trip", i), size) for i, size in enumerate(sizes)]
        counts += [Axis(v, v.attrs["count"], v.hint) for v in part.own]
        if self.walk is not None:  # programs of one group stand beside each other
            counts.reverse()
        while len(counts) > 3 - split:  # the first two share an axis
            high, low = counts[:2]
            counts[:2] = [Axis(None, g.mul(high.count, low.count), shared=(high, low))]
        for one in counts:
            self._place(own, one, axis(one.count))
        return own, grid, axis(g.param("splits")) if split else None

    def _queued(self, trips: list[Region]) -> bool:
        """Whether data says how many tiles a group has, so that programs walk a queue of them."""
        assert self.walk is not None
        steps, bounds = self.walk.steps, [r.bounds for r in trips if r.bounds is not None]
        if steps not in trips or steps is None or not all(is_zero(low) for low, _, _ in bounds):
            return False
        varying = {
            n
            for n in nodes_in([high for _, high, _ in bounds])
            if n.op in ("iv", "phi", "pid", "vpid", "loopout")
        }
        data = any(upper(self.g, high) is None for _, high, _ in bounds)
        return data and varying <= {steps.iv} and is_number(steps.bounds[2], 1)  # type: ignore[index]

    def _in_order(self, made: OwnerKernel, walk: Walk) -> None:
        """Have gradients be NaN where tensors that bound groups are not in order."""
        asked = [*made.asked, *walk.asked]
        ordered = [one for one in asked if isinstance(one, packed.Ordered)]
        made.asked = [one for one in asked if not isinstance(one, packed.Ordered)]
        made.ordered = tile_queues.in_order(self.g, every_write(made.effects), ordered)
        made.notes += [f"gradients are NaN where `{name}` decreases" for name in made.ordered]

    def _walked(self, made: OwnerKernel, own: dict[Any, Node], part: Part, walk: Walk) -> None:
        """Have programs walk a queue of the tiles that are owned, as those of the forward walk theirs."""
        g, counts = self.g, {own[v]: self.count(v) for v in part.own}
        assert walk.steps is not None
        with g.at(walk.steps):
            for i, (step, region) in enumerate(part.trips):
                if region is not walk.steps:
                    count = g.make("cdiv", (region.bounds[1], step))  # type: ignore[index]
                    counts[own["trip", i]] = Rewriter(g, self.grid_param).node(count)
        group = next(own["trip", i] for i, (_, region) in enumerate(part.trips) if region is walk.steps)
        made.effects = [tile_queues.queued(g, walk.steps, group, counts, made.effects, made.name)]
        made.grid[:] = [g.mul(g.const(2), g.npid(walk.axis))]
        made.notes += ["programs walk a queue of those tiles, twice as many as the forward has"]

    def _note(self, made: OwnerKernel, plan: Plan) -> str:
        """Who owns what in a kernel, and over what it sums."""
        part = plan.parts[0]
        names = ", ".join(adjoint_name(base) for base in made.bases)
        summed = [v.hint for v in part.virtual if v not in part.own]
        summed += [r.iv.hint for r in part.reduced if r.iv is not None]
        note = f"one program owns a tile of {names}"
        if summed:
            note += f", summed over {', '.join(f'`{s}`' for s in summed if s)}"
        if made.split:
            note += "; each of a few programs sums a share, the rows are added up afterwards"
        return note

    def count(self, v: Node) -> Node:
        """The number of values of a program variable."""
        return self.in_kernel(v.attrs["count"])

    def in_kernel(self, count: Node) -> Node:
        """What the host counts, in a kernel: the grid of the forward comes in as a parameter."""
        return Rewriter(self.g, self.grid_param).node(count)

    def grid_param(self, node: Node) -> Node | None:
        return self.g.param(f"grid_{node.attrs['axis']}") if node.op == "npid" else None

    def _idle(self, counts: list[Node]) -> bool:
        """Whether the traced call would have too few owners for a device."""
        known = [self.g.concrete(count, self.g.launched(self.grid)) for count in counts]
        return all(isinstance(n, int) for n in known) and math.prod(known) < PROGRAMS

    def _long(self, shared: Node | None) -> bool:
        """Whether the traced call sums over more programs than one owner should walk alone."""
        steps = None if shared is None else self.g.concrete(shared.attrs["count"], self.g.launched(self.grid))
        return isinstance(steps, int) and steps >= LONG

    def _place(self, own: dict[Any, Node], axis: Axis, at: Node) -> None:
        """What a grid axis stands for; where variables share one, they are its digits."""
        g = self.g
        if axis.shared is None:
            own[axis.key] = at
            at.hint = at.hint or axis.hint
            return
        high, low = axis.shared
        count = Rewriter(g, self.grid_param).node(low.count)
        self._place(own, low, g.make("mod", (at, count)))
        self._place(own, high, g.make("floordiv", (at, count)))

    def _leave(self, plans: list[Plan], why: str) -> None:
        """Say why gradients stay with the main kernel."""
        for plan in plans:
            self.refuse(plan.base, plan.parts[0].write.line, why)

    def _guarded(self, effect: GradWrite, plan: Plan, nest: Nest) -> object:
        """A write under the compile-time conditions of the original: the pointer may be None without them."""
        result: object = effect
        for region in reversed(plan.parts[0].path):
            if region.cond is not None and is_static(region.cond):
                cond = nest.at_top(region.cond)
                self.g.here = self.g.top
                stmt = self.g.fork(cond, static=True)
                (stmt.then_effects if region.positive else stmt.other_effects).append(result)
                result = stmt
        return result

    def _trips(self, plan: Plan, index: int) -> Node:
        g = self.g
        counts = []
        for part in plan.parts:
            lo, hi, step = part.trips[index][1].bounds  # type: ignore[misc]
            start = g.const(0) if plan.absolute or not Affine(g).uniform(lo) else lo
            counts.append(g.make("cdiv", (g.sub(self.most(hi), start), step)))  # type: ignore[arg-type]
        return functools.reduce(lambda a, b: g.make("maximum", (a, b)), counts)

    def _remove(self, plan: Plan) -> None:
        gone = {id(part.write if part.turned is None else part.turned.origin) for part in plan.parts}
        if self.walk is not None:
            gone = {id(self.walk.origins[at]) for at in gone}

        def clean(effects: list) -> None:
            effects[:] = [e for e in effects if id(e) not in gone]
            for body in (body for effect in effects for body in bodies(effect)):
                clean(body)

        clean(self.reverse.effects)

    def summed(self, made: OwnerKernel) -> Node:
        """The count of the program variable that the splits share."""
        return made.shared.attrs["count"]  # type: ignore[union-attr]


@dataclass
class Axis:
    """An axis of an owner kernel's grid: a variable, or two that share it."""

    key: Any
    count: Node
    hint: str | None = None
    shared: tuple[Axis, Axis] | None = None


@dataclass
class Address:
    """The dimensions of an address, the variables they determine, all groups that do, what is asked."""

    groups: list[Group]
    known: set
    every: list[Group]
    asked: list[packed.Asked] = field(default_factory=list)
    stored: Store | None = None  # whose rows it has


@dataclass
class Plan:
    base: Node
    parts: list[Part]
    absolute: bool
    key: tuple
    dots: bool


def _name(var: Var) -> str:
    """A variable of an address, for people."""
    if var.region is not None:
        return f"`{var.region.iv.hint}`" if var.region.iv and var.region.iv.hint else "a loop"
    return f"`{var.node.hint}`" if var.node is not None and var.node.hint else var.kind

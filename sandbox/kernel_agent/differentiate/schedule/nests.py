"""The loops of an owner kernel: values of the forward rebuilt in them, for one element of what it owns.

What the kernel's grid tells is fixed; other programs of the forward, and its loops, are steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ir.nodes import Carry, For, GradWrite, Node, Region, Store, nodes_in
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import is_static, loop_out, takes_loop
from ..prove import packed
from ..prove.affine import Affine
from ..prove.bounds import first as first_program
from ..prove.bounds import last as last_program
from ..prove.masks import parts as conditions
from .operands import Operands
from .windows import Turned

if TYPE_CHECKING:
    from .owner import Owner
    from .runs import Run


@dataclass(eq=False)
class Part:
    """One write: its path of regions, the program variables and loops it owns, the loops it sums over."""

    write: GradWrite
    path: tuple[Region, ...]
    own: tuple[Node, ...]
    trips: list[tuple[Node, Region]]
    reduced: tuple[Region, ...]
    layouts: list
    covers: Node | None = None  # how many elements all owners reach
    virtual: tuple[Node, ...] = ()  # all its program variables
    turned: Turned | None = None  # how its window was turned around
    asked: list[packed.Asked] = field(default_factory=list)  # of tensors
    stored: Store | None = None  # of an output, which keeps its rows apart
    run: Run | None = None  # of entries that its programs walk


class Nest:
    """The loops of one part: rebuilds values with owned variables fixed and the others as loops."""

    def __init__(
        self,
        owner: Owner,
        parts: list[Part],
        own: dict,
        absolute: bool,
        splits: Node | None,
        operands: Operands,
    ) -> None:
        self.owner, self.g, self.parts, self.own = owner, owner.g, parts, own
        self.operands = operands
        self.absolute, self.splits = absolute, splits
        self.regions: dict[Region, Region] = {}
        self.variables: dict[Node, Node] = {}  # of the forward's loops
        self.actual: dict[Node, Node] = {}  # of its programs
        self.memo: dict[Node, Node] = {}
        self.levels: list[tuple[str, Region]] = []
        self.flat: Region | None = None  # where all that is made stands
        self.fixed: dict[Region, Region] = {}  # branches that move outside
        self.certain: set[Region] = set()  # loops that every program left in the window reaches
        self._enter()
        self.addresses = self.all_addresses()

    def all_addresses(self) -> list[tuple[Node, Node | None]]:
        """Of each write, what the grid determines: the address that the tile's owner stores to, and its
        mask."""
        return [(self.at_top(p.write.offset), self.store_mask(p.write)) for p in self.parts]

    def totals(self) -> list[Node]:
        zeros = [self.g.zeros(p.write.value.shape, p.write.value.dtype) for p in self.parts]
        with self.g.at(self.g.top):
            return self._nest(0, zeros)

    def _enter(self) -> None:
        """Make the new regions, outermost first."""
        g, part = self.g, self.parts[0]
        g.here = g.top
        first = True
        for region in part.path:  # what is known when the kernel is compiled is asked outside all loops
            if region.cond is not None and is_static(region.cond):
                g.here = self.fixed[region] = g.branch(self.node(region.cond), region.positive)
                self.levels.append(("branch", g.here))
        self.actual = {v: self.own[v] for v in part.virtual if v in part.own}
        for v in (v for v in part.virtual if v not in part.own):
            region = g.loop_region(*self.steps(v, first), "range", part.write.line)
            region.iv.hint = region.iv.hint or v.hint  # type: ignore[union-attr]
            self.actual[v] = region.iv  # type: ignore[assignment]
            self.levels.append(("loop", region))
            g.here = region
            first = False
        self.regions[g.top] = g.here
        for region in part.path:
            g.here = self.regions[region.parent]  # type: ignore[index]
            gone = region in self.fixed or (part.turned is not None and region in part.turned.gone)
            self.regions[region] = g.here if gone else self._region(region, part)

    def steps(self, v: Node, first: bool) -> tuple[Node, Node, Node]:
        """The bounds of the loop over a variable of programs, and its step; `first`: outside of others."""
        start, end = self.g.const(0), self.owner.count(v)
        if first and self.splits is not None:
            return self.splits, end, self.g.intern("npid", (), self.splits.attrs, "int32", ())
        return *self._window(v, start, end), self.g.one

    def program(self, value: Node) -> Node:
        """A value of program variables, in terms of this kernel's ids and loops."""
        new = Rewriter(self.g, self.actual.get).node(value)
        if any(n.op == "vpid" for n in nodes_in([new])):
            raise NotOwned("a value needs the number of a program that this kernel does not have")
        return new

    def _window(self, v: Node, start: Node, end: Node) -> tuple[Node, Node]:
        """Leave out the programs whose loops do not reach the owned tile."""
        g, part, tiles = self.g, self.parts[0], self.owner.tiles
        here, g.here = g.here, g.top
        for index, (step, region) in enumerate(part.trips):
            lo, hi, _ = region.bounds  # type: ignore[misc]
            fixed = Affine(g).uniform(lo) and not self.absolute
            value = g.mul(self.own["trip", index], step)
            value = g.add(lo, value) if fixed else value
            low, exact = first_program(g, tiles.node(hi), v, value)
            if low is not None:
                start = low if start.op == "const" else g.make("maximum", (start, low))
            others = [w for w in part.virtual if w is not v and w not in part.own]
            if exact and fixed and is_zero(lo) and len(part.trips) == 1 and not others:
                self.certain.add(region)
            high = None if fixed else last_program(g, tiles.node(lo), v, value)
            if high is not None:
                end = g.make("minimum", (end, high))
        g.here = here
        return self.named(start, "first"), self.named(end, "last")

    def named(self, node: Node, hint: str) -> Node:
        if node.op not in ("const", "constexpr", "param", "npid") and node.hint is None:
            node.hint = hint
        return node

    def _region(self, region: Region, part: Part) -> Region:
        g = self.g
        if not region.is_loop:
            new = g.branch(self.node(region.cond), region.positive)  # type: ignore[arg-type]
            self.levels.append(("branch", new))
            return new
        lo, hi, step = (self.node(n) for n in region.bounds)  # type: ignore[union-attr]
        if region in part.reduced:
            new = g.loop_region(lo, hi, step, region.call, region.line)
            new.iv.hint = new.iv.hint or region.iv.hint  # type: ignore[union-attr]
            self.levels.append(("loop", new))
            self.variables[region.iv] = new.iv  # type: ignore[index, assignment]
            return new
        index = [r for _, r in part.trips].index(region)
        pid = self.own["trip", index]
        affine = Affine(g)
        fixed = affine.uniform(region.bounds[0]) and not self.absolute  # type: ignore[index]
        with g.at(g.top):  # the grid determines it
            iv = g.mul(pid, self.at_top(region.bounds[2]))  # type: ignore[index]
            if fixed:
                iv = g.add(self.at_top(region.bounds[0]), iv)  # type: ignore[index]
        if iv.hint is None:
            iv.hint = region.iv.hint  # type: ignore[union-attr]
        self.variables[region.iv] = iv  # type: ignore[index]
        if region in self.certain | self.owner.reached or fixed and affine.uniform(region.bounds[1]):  # type: ignore[index]
            return g.here
        inside = g.compare("<", iv, hi)
        if not (lo.op == "const" and lo.value == 0):
            inside = g.both(g.compare(">=", iv, lo), inside)
        new = g.branch(inside, True)
        new.skips = True
        self.levels.append(("branch", new))
        for known, place in self.regions.items():  # all that is still to come happens only inside
            if place is g.here:
                self.regions[known] = new
        return new

    def _nest(self, depth: int, accs: list[Node]) -> list[Node]:
        g = self.g
        if depth == len(self.levels):
            g.here = self.regions[self.parts[0].path[-1]] if self.parts[0].path else self.regions[g.top]
            return [g.add(acc, self.value(part.write)) for acc, part in zip(accs, self.parts, strict=True)]
        kind, region = self.levels[depth]
        outer = region.parent
        if kind == "loop":
            loop = For(region, outer, order="forward", line=region.line)  # type: ignore[arg-type]
            names = [part.write.base.attrs["name"].removesuffix("_ptr") for part in self.parts]
            phis = [g.adjoint_carry(f"d_{n}_sum", a, region) for n, a in zip(names, accs, strict=True)]
            nexts = self._nest(depth + 1, phis)
            loop.carries = [Carry(p, a, n) for p, a, n in zip(phis, accs, nexts, strict=True)]
            outs = [loop_out(g, loop, k) for k in range(len(phis))]
            for out in outs:
                out.upstream = True
            return outs
        g.here, cond = outer, region.cond  # type: ignore[assignment]
        stmt = g.fork(cond, is_static(cond))  # type: ignore[arg-type]
        results = []
        for acc, new in zip(accs, self._nest(depth + 1, accs), strict=True):
            then, other = (new, acc) if region.positive else (acc, new)
            out = g.merged(stmt, then, other, acc, outer)  # type: ignore[arg-type]
            out.upstream, out.hint = True, acc.hint or "d_sum"
            results.append(out)
        return results

    def value(self, write: GradWrite) -> Node:
        """The value of one iteration; lanes that the mask excludes here contribute nothing."""
        g = self.g
        value = self.node(write.value)
        for mask in conditions(write.mask):
            if self.owner.varies(mask, self.parts[0].own, self.parts[0].reduced):
                value = g.where(self.node(mask), value, g.number(0))
        return value

    def store_mask(self, write: GradWrite) -> Node | None:
        self.g.here = self.g.top
        result: Node | None = None
        for mask in conditions(write.mask):
            if not self.owner.varies(mask, self.parts[0].own, self.parts[0].reduced):
                result = self.g.both(result, self.at_top(mask))
        return result

    def at_top(self, node: Node, known: dict[Node, Node] | None = None, home: Region | None = None) -> Node:
        """A value that depends on owned variables only, outside all loops and branches, or in `home`; `known`
        has those that it depends on beside them."""
        self.memo, memo, self.flat = dict(known or {}), self.memo, home or self.g.top
        new = self.node(node)
        self.memo, self.flat = memo, None
        return new

    def node(self, node: Node) -> Node:
        """A value of the main kernel, in this one."""
        if node not in self.memo:
            with self.g.at(self._home(node)):
                self.memo[node] = self._rebuilt(node)
        return self.memo[node]

    def _home(self, node: Node) -> Region:
        if self.flat is not None:
            return self.flat
        return next((self.regions[r] for r in node.home.chain() if r in self.regions), self.g.here)

    def _rebuilt(self, node: Node) -> Node:
        g = self.g
        if node in self.variables:
            return self.variables[node]
        if node in self.owner.programs.table:
            return self.program(self.owner.programs.table[node])
        if node in self.actual:
            return self.actual[node]
        if node.op in ("const", "constexpr", "param"):
            return node
        if node.op == "npid":
            return self.owner.grid_param(node)  # type: ignore[return-value]
        if self._loops_by_a_flag(node):
            return self._choice(node)
        if self.owner.spills.narrowed(node) and self._loops_by_a_flag(node.args[0]):
            return self._choice(node.args[0], node)
        if self.owner.spills.wanted(node):
            if any(n.op == "vpid" for n in nodes_in([node])):
                why = "took a loop, and hangs on parts of a program's number, which the main kernel has not"
                raise NotOwned(f"`{node.hint or 'a value'}` {why}")
            return self.owner.spills.load(node, self.node)
        if node.op == "ifout":
            return self._choice(node)
        if node.op in ("loopout", "phi", "pid", "iv", "vpid"):
            raise NotOwned(f"`{node.hint}` cannot be computed for one tile")
        args = [self.node(arg) for arg in node.args]
        if node.op == "dot":
            args[:2] = [self.operands.of(arg, self.counts()) for arg in args[:2]]
        new = g.again(node, args)
        if new.hint is None:
            new.hint = node.hint
        return new

    def counts(self) -> dict[Node, Node]:
        """How many values numbers of this kernel have, of those of which each comes with each of the others
        in every call: of programs, and of owned steps that all programs make."""
        part, affine = self.parts[0], Affine(self.g)
        if part.turned is not None or self.owner.walk is not None:
            return {}
        bounds = [region.bounds for region in part.path if region.bounds is not None]
        same = all(affine.uniform(bound) for of_loop in bounds for bound in of_loop)
        steps = [number for key, number in self.own.items() if key not in part.own]
        found = self.operands.of_grid(self.own.values(), steps, same)
        for v, number in self.actual.items():
            if number.op == "iv":
                found[number] = v.attrs["count"]
        return found

    def _loops_by_a_flag(self, node: Node) -> bool:
        """Whether a value took a loop on one side alone of what is known when the kernel is compiled: on the
        other it need not be kept."""
        if node.op != "ifout":
            return False
        sides = [node.attrs[key] for key in ("then", "other")]
        if node.attrs["if"] not in self.owner.spills.branches() or None in sides:
            return False
        return is_static(node.args[0]) and sorted(map(takes_loop, sides)) == [False, True]

    def _choice(self, node: Node, narrowed: Node | None = None) -> Node:
        """`narrowed`: the cast of it that is wanted, made on each side."""
        g, old = self.g, node.attrs["if"]
        cond = self.node(old.cond)
        stmt = g.fork(cond, old.static, old.line)
        chosen = []
        for key, region, source in (("then", stmt.then, old.then), ("other", stmt.other, old.other)):
            self.regions.setdefault(source, region)
            value = node.attrs[key]
            if narrowed is not None:
                with g.at(value.home):
                    value = self.owner.spills.cast(value, narrowed)
            with g.at(region):
                chosen.append(value and self.node(value))
        then, other = chosen
        return g.merged(stmt, then, other, narrowed or node, g.here)


class NotOwned(Exception):
    """A value that cannot be had in an owner kernel: the write stays atomic."""

"""Turns a window around: a gradient scattered over `o * stride + k * dilation - padding` is gathered.

A convolution reads an input at the sum of a position and a tap, so that many (position, tap) pairs meet in
one element of the input's gradient. For a fixed tap, position and index determine each other: o = (i - k *
dilation + padding) / stride, where the division has no remainder and o is a position of the forward. The
write is therefore made again with the index i as the variable that lanes and programs count, taps become
loops, and the value is evaluated at the o that this gives; lanes without one contribute nothing. The new
address is an affine nest in which every element has one owner: `disjoint` proves that, as for any other
write.

All of this is exact, or refused: bounds of i come from the mask or from the largest o and taps, and a factor
whose sign only the host can know is asked of it before the launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

from ..ir.graph import Graph
from ..ir.nodes import GradWrite, Node, Region, nodes_in
from ..ir.nonnegative import natural
from ..ir.rewriter import Rewriter
from ..prove.affine import Affine, Axes, Form, Group, Monomial, Var, divide, nonzero, times
from ..prove.disjoint import monomial_node
from ..prove.positions import Condition, Entry, NotTurned, Position, Reader, chained, completed, conditions
from . import tap_steps
from .programs import Programs
from .reindex import Place, Reindex, Sums, lift

TAP_STRIDE = 16  # lanes this near in a loop's steps stand at windows, which may overlap in another call
LANES = 16  # a digit shorter than this is walked by a loop; the lanes count what is left


@dataclass
class Turned:
    """A write at new positions, and which program variables and loops it has instead of the forward's."""

    write: GradWrite
    origin: GradWrite
    virtual: list[Node]
    gone: set[Region]
    axes: set[int]  # of the block, along which lanes are at new positions
    facts: list[tuple[Node, list[Var]]]  # a number that is known gives these variables
    positive: list[Node]  # what the host has to find above zero
    equal: list[tuple[Node, Node]]  # what it has to find equal
    window: bool  # whether it was one: else positions are only counted in another way
    covers: Node | None  # how many elements it reaches, each once, where that is known
    what: str  # the proof


@dataclass
class Window:
    """One address dimension: the entry that is solved for, the taps, the owned range [low, low + size)."""

    group: Group
    solved: Entry
    taps: list[Entry]
    low: Form = field(default_factory=dict)
    size: Node | None = None
    place: Node | None = None  # the owned count, from 0
    bounded: bool = True  # by the mask, from both sides: else by its summands, or how many programs are


def windowed(g: Graph, programs: Programs, tiles: Rewriter, grid: tuple[int, ...], write: GradWrite) -> bool:
    """Whether strides in an address are so close that they may overlap in another call."""
    with g.at(write.region):
        trial = Turn(g, programs, tiles, grid, write)
        groups = trial.affine.groups(trial.offset)
        return groups is not None and trial.overlapping(groups) is not None


def turn(
    g: Graph,
    programs: Programs,
    tiles: Rewriter,
    grid: tuple[int, ...],
    write: GradWrite,
    kept: Callable,
    shifted: bool = False,
) -> Turned:
    """The write at new positions. Raises NotTurned.

    `kept(node, index, also)` makes a load of a value that the main kernel keeps, None for others. `shifted`:
    own the indices that the mask allows, wherever the positions stand, so that writes to neighbours of each
    other have the same owners.
    """
    with g.at(write.region):
        turning = Turn(g, programs, tiles, grid, write)
        turning.shifted = shifted
        return turning.run(kept)


class Turn:
    """One write on its way."""

    def __init__(
        self, g: Graph, programs: Programs, tiles: Rewriter, grid: tuple[int, ...], write: GradWrite
    ) -> None:
        self.g, self.programs, self.tiles, self.write = g, programs, tiles, write
        self.affine = Affine(g, start=tiles.node)
        self.sums = Sums(g, self.affine)
        self.axes: Axes = tuple(range(len(write.offset.shape)))
        self.kept: Axes = self.axes  # those that are not summed over
        self.traced = g.launched(grid)
        mask = None if write.mask is None else tiles.node(write.mask)
        self.offset, self.mask = tiles.node(write.offset), mask
        self.reader = Reader(g, self.affine, mask, len(self.axes))
        self.created: list[Node] = []
        self.positive: list[Node] = []
        self.taps: dict[Entry, Node] = {}  # digits that have become loops
        self.facts: list[tuple[Node, list[Var]]] = []
        self.ends: dict[Position, Node] = {}
        self.totals: list[Node] = []  # how many elements are owned along positions
        self.shifted = False  # whether dimensions without taps are windows too
        self.low: dict[Position, Node] = {}  # lowest digits that lanes count
        self.used: list[Condition] = []  # conditions that hold for every owned index
        self.stepped: dict[Entry, tap_steps.Steps] = {}  # taps of which a loop walks those alone that fit
        self.tap_places: list[tuple[Entry, Node, int | None]] = []  # which of them a step is at

    def run(self, kept: Callable) -> Turned:
        g = self.g
        windows, plain = self._windows()
        moved = list(dict.fromkeys(w.solved.position for w in windows if w.solved.position is not None))
        for window in windows:
            self._range(window)
        self.stepped = tap_steps.find(
            g,
            self.write,
            {w.taps[0]: w.solved.multiplier for w in windows if len(w.taps) == 1},
            self._monomial,
        )
        if not self.stepped:
            return self._turned(windows, plain, moved, self.write.region, kept)
        region = max((loop.region for loop in self.stepped.values()), key=lambda r: r.depth)
        with g.at(region):
            return self._turned(windows, plain, moved, region, kept)

    def _turned(
        self, windows: list[Window], plain: list[Group], moved: list[Position], region: Region, kept: Callable
    ) -> Turned:
        g = self.g
        for position in moved:
            self._tile(position, _of(position, windows))
        solved = [self._solve(position, _of(position, windows)) for position in moved]
        places = [place for found, _ in solved for place in found]
        valid = [condition for _, condition in solved]
        places += [Place(tap.terms, at, axis) for tap, at, axis in self.tap_places]
        gone = {var for position in moved for var in position.terms}
        gone |= {tap.var for tap in self.stepped}
        self._free(gone, region)
        reindex = Reindex(self.g, self.affine, self.tiles, places, gone, region)
        lanes = not any(position.programs for position in moved)
        reindex.kept = lambda node, axes: kept(
            node, lambda: self._stored(reindex, moved, node, axes), lanes and node.op == "reduce"
        )
        summed = {p.axis for p in moved if p.summed is not None}
        self.kept = tuple(axis for axis in self.axes if axis not in summed)
        offset = self._address(windows, plain)
        for position, condition in zip(moved, valid, strict=True):
            if position.limit is not None:
                reindex.known[position.limit.node, position.limit.axes] = condition.node
        asked = self._asked(reindex, moved, windows)
        old = self.write
        value = reindex.node(old.value, self.axes[len(self.axes) - len(old.value.shape) :])
        for condition in [*valid, *(c for c in asked if not set(c.axes) <= set(self.kept))]:
            value = g.where(lift(g, condition.node, condition.axes, self.axes), value, g.number(0))
        for axis in self.axes[::-1]:
            if axis not in self.kept:
                value = g.reduce("sum", value, axis)  # type: ignore[arg-type]
        mask = self._mask([c for c in asked if set(c.axes) <= set(self.kept)])
        new = GradWrite(old.base, offset, mask, value, region, old.line)
        lost = {v for position in moved for v in position.programs}
        virtual = [v for v in self.programs.virtual if v not in lost] + self.created
        regions = {p.region for p in moved if p.region is not None}
        axes = {self.kept.index(p.axis) for p in moved if p.axis in self.kept}
        equal = [p.equal for p in moved if p.equal is not None]
        turned = self.shifted or any(w.taps for w in windows)
        what = ("window turned around: " if turned else "position counted anew: ") + self._text(windows)
        facts = [(number, [self._renumbered(var) for var in variables]) for number, variables in self.facts]
        every = not plain and len(asked) == len(self.ends)
        covers = functools.reduce(g.mul, self.totals) if every else None
        return Turned(new, old, virtual, regions, axes, facts, self.positive, equal, turned, covers, what)

    def _renumbered(self, var: Var) -> Var:
        """A lane of the new block: axes that were summed over are gone."""
        if var.kind != "lane":
            return var
        return Var("lane", (self.kept.index(var.key[0]), *var.key[1:]), var.node)

    # which index of the address is a window

    def _windows(self) -> tuple[list[Window], list[Group]]:
        groups = self.affine.groups(self.offset)
        if groups is None:
            raise NotTurned("mixed", "its address is not a sum of strides times indices")
        groups, merged = self._merged([self._unit(group) for group in groups] if self.shifted else groups)
        entries = [self.reader.entries(group) for group in groups]
        windows = [
            self._window(group, found)
            for group, found in zip(groups, entries, strict=True)
            if any(group is one for one in merged)
            or (len(found) > 1 and not self.affine.solve(group))
            or any(e.position is not None and e.position.equal is not None for e in found)
            or (self.shifted and self._alone_in(found))
        ]
        if not windows:
            windows = self._partial(groups, entries)
        if not windows:
            raise NotTurned("mixed", "no window was found in its address")
        moved = {w.solved.position for w in windows}
        for tap in [tap for w in windows for tap in w.taps]:
            if tap.position is not None and tap.position.programs and tap.terms is tap.position.terms:
                why = "its windows overlap from program to program: each would walk all of them"
                raise NotTurned("mixed", why)
            if tap.position is not None and tap.position.axis is not None:
                moved.add(tap.position)
        plain = []
        for group, found in zip(groups, entries, strict=True):
            if any(w.group is group for w in windows):
                continue
            if not any(e.position in moved for e in found):
                plain.append(group)
            elif len(found) > 1:
                raise NotTurned("mixed", "an index beside its window is shared with it")
            else:
                windows.append(Window(group, found[0], []))
        for position in moved:
            assert position is not None
            if not any(w.solved.position is position for w in windows):
                raise NotTurned("lanes", "lanes of a block run over the taps of its window")
            if not chained(self.affine, position):
                raise NotTurned("mixed", "its address holds only some digits of a position")
        self._alone(moved, entries)
        return windows, plain

    def _partial(self, groups: list[Group], entries: list[list[Entry]]) -> list[Window]:
        """Dimensions that hold some digits of lanes: `at // h` is one element for h lanes."""
        found = [
            Window(group, entry, [])
            for group, (entry, *others) in zip(groups, entries, strict=True)
            if entry.position is not None and not others and entry.terms is not entry.position.terms
        ]
        positions = dict.fromkeys(window.solved.position for window in found)
        able = {
            p
            for p in positions
            if p is not None
            and not chained(self.affine, p)
            and completed(self.g, self.affine, p, lambda size: (self._number(size) or LANES) < LANES)
        }
        return [window for window in found if window.solved.position in able]

    def _alone(self, moved: set, entries: list[list[Entry]]) -> None:
        """A variable of a moving position is part of nothing else: shared lanes would move together."""
        taken = [var for position in moved for var in position.terms]
        for entry in [entry for found in entries for entry in found]:
            if entry.position not in moved:
                terms = entry.terms if entry.position is None else entry.position.terms
                taken += set(terms) & set(taken)
        if len(set(taken)) < len(taken):
            raise NotTurned("mixed", "two positions in its address share a program or a lane")

    def _unit(self, group: Group) -> Group:
        """A dimension in the units of the index that the mask bounds: `at * stride - padding >= 0`."""
        mine = dict(group.terms)
        for known, _, _ in self.reader.bounds.found:
            ratios = {divide(known[var], m) for var, m in mine.items()} if set(known) == set(mine) else set()
            ratio = ratios.pop() if len(ratios) == 1 else None
            base = None if ratio is None or ratio[0] < 1 else divide(group.coefficient, ratio)
            if ratio is not None and ratio != (1, ()) and base is not None:
                return Group(base, [(var, times(m, ratio)) for var, m in group.terms])
        return group

    @staticmethod
    def _alone_in(entries: list[Entry]) -> bool:
        """Whether a dimension is one position of lanes and nothing else."""
        position = entries[0].position
        return len(entries) == 1 and position is not None and position.axis is not None

    def _window(self, group: Group, entries: list[Entry]) -> Window:
        """The entry that moves: one with lanes, the longest."""
        placed = [(e, e.position) for e in entries if e.position is not None]
        able = [
            (p.axis is not None, self._number(e.size) or 0, e)
            for e, p in placed
            if p.axis is not None or p.programs
        ]
        if not able:
            raise NotTurned("mixed", "no position of lanes or programs is in its window")
        *_, solved = max(able, key=lambda one: one[:2])
        return Window(group, solved, [e for e in entries if e is not solved])

    def _merged(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """Join strides that overlap: `at * stride + k` with a stride known only at run time is one index."""
        groups, merged = list(groups), []
        while (pair := self.overlapping(groups)) is not None:
            high, low = pair
            merged.append(_joined(high, low))
            groups = [merged[-1] if group is low else group for group in groups if group is not high]
        return groups, merged

    def overlapping(self, groups: list[Group]) -> tuple[Group, Group] | None:
        """Those first that the mask bounds together: they are one index, whatever else their steps reach."""
        reader = Reader(self.g, self.affine, self.mask, len(self.axes))
        pairs = sorted(permutations(groups, 2), key=lambda pair: not _is_bounded(reader, *pair))
        return next((pair for pair in pairs if self._overlap(*pair)), None)

    def _overlap(self, high: Group, low: Group) -> bool:
        """Whether steps along `high` are not longer than `low`, or nearly so, in the traced call."""
        step, least, unit = self._step(high), self._step(low), self._value(low.coefficient)
        reader = Reader(self.g, self.affine, self.mask, len(self.axes))
        try:
            longest = self._number(self._extent(reader, reader.entries(low))[1])
        except NotTurned:
            return False
        if longest is None or unit is None or step is None or least is None:
            return False
        taps = longest > 1 and all(v.kind == "trip" for v, _ in low.terms)
        lanes = any(v.kind == "lane" for v, _ in high.terms) or _is_bounded(reader, high, low)
        reach = (longest - 1) * abs(unit)
        return least <= step <= (max(reach, TAP_STRIDE * least) if taps and lanes else reach)

    def _step(self, group: Group) -> int | None:
        """The shortest step along an address dimension, in the traced call."""
        steps = [self._value(times(group.coefficient, m)) for _, m in group.terms]
        return min((abs(s) for s in steps if s is not None), default=None) if None not in steps else None

    # the range of each index

    def _range(self, window: Window) -> None:
        """What of an index is owned, and the factors whose sign that takes."""
        whole = window.solved.position is not None and window.solved.terms is window.solved.position.terms
        if not window.taps and window.solved.multiplier == (1, ()) and not (self.shifted and whole):
            window.size = self._size(window.solved)
            window.bounded = window.solved.position is None or window.solved.position.limit is not None
            return
        low, window.size, used = self._extent(self.reader, [window.solved, *window.taps])
        window.low = nonzero(low)
        self.used += [c for c in used if c is not None]
        self._sign(window.solved.multiplier)
        if len(used) < 2:
            window.bounded = False
            for tap in window.taps:
                self._sign(tap.multiplier)

    def _extent(self, reader: Reader, entries: list[Entry]) -> tuple[Form, Node, list[Condition | None]]:
        """(low, size, conditions used): an index is in [low, low + size), from the mask where it says so,
        else from its summands."""
        terms = summed(entries)
        above, below = reader.bounds.upper(terms), reader.bounds.lower(terms)
        low: Form = {(): {}} if below is None else below[0]
        top = dict((above[0] if above is not None else self._longest(entries))[()])
        for ids, factor in low[()].items():
            top[ids] = top.get(ids, 0) - factor
        return low, reader.uniform({(): top}), [found[1] for found in (above, below) if found is not None]

    def _size(self, entry: Entry) -> Node:
        """One more than the highest value of an entry."""
        if entry.size is not None:
            return entry.size
        assert entry.position is not None
        return self.g.make("cdiv", (entry.position.count, monomial_node(self.affine, self.g, entry.low)))

    def _longest(self, entries: list[Entry]) -> Form:
        """One more than the largest sum of a position and its taps."""
        total: dict[tuple[int, ...], int] = {(): 1}
        for entry in entries:
            last = self.g.sub(self._size(entry), self.g.one)
            for variables, coefficients in self.affine.terms(last, ()).items():
                if variables:
                    raise NotTurned("bounds", "a summand of its window has no bound")
                for ids, factor in coefficients.items():
                    scaled = times((factor, ids), entry.multiplier)
                    total[scaled[1]] = total.get(scaled[1], 0) + scaled[0]
        return {(): {ids: f for ids, f in total.items() if f}}

    def _sign(self, multiplier: Monomial) -> None:
        """A factor has to be positive; what the host alone knows it is asked."""
        factor, ids = multiplier
        if factor < 0:
            raise NotTurned("mixed", "a window runs backwards without bounds in its mask")
        for i in ids:
            node = self.affine.nodes[i]
            if node not in self.positive:
                self.positive.append(node)

    # owned tiles

    def _variable(self, count: Node, hint: str) -> Node:
        g = self.g
        axis = len(self.programs.virtual) + len(self.created)
        with g.at(g.top):
            vpid = g.intern("vpid", (), {"axis": axis, "count": count}, "int32", ())
        vpid.attrs["count"] = count
        vpid.hint = vpid.hint or hint
        self.created.append(vpid)
        return vpid

    def _tile(self, position: Position, windows: list[Window]) -> None:
        """Number the owned elements of a position's dimensions: the lowest digit is next to its neighbour."""
        g = self.g
        sizes = [w.size for w in windows if w.size is not None]
        if len(sizes) > 1:  # digits of a number: what they are cut by must be positive
            sizes = [size if natural(size) else g.make("maximum", (size, g.one)) for size in sizes]
        total = functools.reduce(lambda below, size: g.mul(size, below), sizes)
        self.totals.append(total)
        name = self._name(position)
        lanes = [v for v in position.terms if v.kind == "lane"]
        if position.block is None or position.summed is not None:
            number = tile = self._variable(total, name)
            variables = [Var("vpid", (tile.attrs["axis"],), tile)]
        else:
            tile, number = self._blocks(total, position.block, lanes[0], f"tile_{name}")
            variables = [Var("vpid", (tile.attrs["axis"],), tile), lanes[0]]
            self.ends[position] = g.compare("<", number, total)
        number.hint = number.hint or f"{name}_owned"
        self.facts.append((number, variables))
        rest = number
        for window, size in zip(windows[:-1], sizes[:-1], strict=True):
            window.place = g.make("mod", (rest, size))
            rest = g.make("floordiv", (rest, size))
        windows[-1].place = rest
        if position.summed is not None:
            assert position.block is not None and position.summed.size is not None
            size = position.summed.size
            _, self.low[position] = self._blocks(size, position.block, lanes[0], f"part_{name}")
        for entry in position.entries:
            if entry is not position.summed and not any(w.solved is entry for w in windows):
                name = (getattr(entry.var.node, "hint", None) if entry.terms else None) or "tap"
                self.taps[entry] = self._variable(self._size(entry), name)

    def _blocks(self, size: Node, block: Node, lane: Var, hint: str) -> tuple[Node, Node]:
        """A variable that counts the blocks of a size, and what its lanes stand at."""
        assert lane.node is not None
        number = self._variable(self.g.make("cdiv", (size, block)), hint)
        return number, self.g.add(self.g.mul(number, block), lane.node)

    def _name(self, position: Position) -> str:
        """What the forward calls a position."""
        nodes = [n for n in nodes_in([self.offset]) if n.hint and not n.is_float]
        return next((n.hint for n in nodes if self._is(n, position)), None) or "at"

    def _is(self, node: Node, position: Position) -> bool:
        if len(node.shape) != len(position.axes):
            return False
        form = nonzero(self.affine.terms(node, position.axes))  # type: ignore[arg-type]
        return form == {(v,): {ids: f} for v, (f, ids) in position.terms.items()}

    # the position behind an index

    def _solve(self, position: Position, windows: list[Window]) -> tuple[list[Place], Condition]:
        """The digits that indices and taps give, where they give any, else those of position 0."""
        g = self.g
        inside: Node | None = None
        whole: Node | None = None
        digits: list[tuple[Entry, Node]] = []

        def ask(left: Node, cmp: str, right: Node) -> None:
            nonlocal inside
            inside = g.both(inside, g.compare(cmp, left, right))

        for entry in position.entries:
            window = next((w for w in windows if w.solved is entry), None)
            if entry is position.summed:
                ask(self.low[position], "<", entry.size)  # type: ignore[arg-type]
                whole = g.signed(whole, self.low[position], 1)
                continue
            digit = self.taps[entry] if window is None else self._digit(window, ask)
            cut = entry.terms is not position.terms and entry.size is not None
            if window is not None and cut and (window.taps or window is windows[-1]):
                ask(digit, "<", entry.size)  # type: ignore[arg-type]
            digits.append((entry, digit))
            whole = g.signed(whole, g.mul(digit, monomial_node(self.affine, g, entry.low)), 1)
        assert whole is not None
        ask(whole, "<", position.count)
        assert inside is not None
        zero = g.const(0)
        places = []
        at = g.where(inside, whole, zero)
        at.hint = at.hint or self._name(position)
        for entry, digit in digits:
            if entry.terms is not position.terms and entry not in self.taps:
                found = g.where(inside, digit, zero)
                found.hint = found.hint or getattr(entry.var.node, "hint", None)
            else:
                found = digit
            if entry.terms and entry.terms is not position.terms:
                places.append(Place(entry.terms, found, position.axis if found.shape else None))
        places.append(Place(position.terms, at, position.axis))
        return places, Condition(inside, position.axes)

    def _digit(self, window: Window, ask: Callable) -> Node:
        """(index - taps) / multiplier."""
        g, entry = self.g, window.solved
        assert window.place is not None and entry.position is not None
        axes = entry.position.axes
        if not window.taps and entry.multiplier == (1, ()) and not window.low:
            return window.place
        number = g.add(window.place, self.reader.uniform(window.low))
        steps = self.stepped.get(window.taps[0]) if window.taps else None
        if steps is not None:
            digit, reached = steps.at(g, number, ask)
            self.tap_places.append((window.taps[0], reached, entry.position.axis))
            return digit
        form: Form = {}
        for tap in window.taps:
            if tap in self.taps:
                number = g.sub(number, g.mul(monomial_node(self.affine, g, tap.multiplier), self.taps[tap]))
                continue
            for var, m in tap.terms.items():
                factor, ids = times(m, tap.multiplier)
                form[(var,)] = {ids: factor}
        if form:
            number = g.sub(number, self.sums.node(form, axes if not number.shape else (), "int32"))
        ask(number, ">=", g.const(0))
        step = monomial_node(self.affine, g, entry.multiplier)
        if entry.multiplier == (1, ()):
            return number
        ask(g.make("mod", (number, step)), "==", g.const(0))
        return g.make("floordiv", (number, step))

    # the write

    def _address(self, windows: list[Window], plain: list[Group]) -> Node:
        """Strides times owned indices, plus what has not moved."""
        g = self.g
        wide = self.offset.dtype
        form: Form = {(): dict(nonzero(self.affine.terms(self.offset, self.axes)).get((), {}))}  # type: ignore[arg-type]
        for group in plain:
            for var, m in group.terms:
                factor, ids = times(group.coefficient, m)
                form[(var,)] = {ids: factor}
        total: Node | None = None
        for window in windows:
            for ids, factor in window.low.get((), {}).items():
                moved = times((factor, ids), window.group.coefficient)
                form[()][moved[1]] = form[()].get(moved[1], 0) + moved[0]
            position = window.solved.position
            assert position is not None and window.place is not None
            at = lift(g, window.place, position.axes, self.kept)
            if wide == "int64":
                at = g.cast(at, wide)
            total = g.signed(total, g.mul(monomial_node(self.affine, g, window.group.coefficient), at), 1)
        assert total is not None
        if nonzero(form):
            total = g.add(self.sums.node(form, self.kept, wide), total)
        shape = tuple(dim for axis, dim in enumerate(self.offset.shape) if axis in self.kept)
        if total.shape != shape:
            total = g.broadcast(total, shape)
        return total

    def _asked(self, reindex: Reindex, moved: list[Position], windows: list[Window]) -> list[Condition]:
        """Where owned indices end, and what the mask asks beyond bounds of positions. Raises NotTurned where
        that may be what keeps an index within the tensor."""
        wanted = [Condition(self.ends[p], (p.axis,)) for p in moved if p in self.ends]
        used = [*self.used, *(p.limit for p in moved if p.limit is not None)]
        free = [window for window in windows if not window.bounded]
        for condition in conditions(self.g, self.mask, len(self.axes)):
            if any(condition.node is one.node and condition.axes == one.axes for one in used):
                continue
            if any(self._hangs(condition, window) for window in free):
                raise NotTurned("bounds", "its mask does not say from where to where its window lies")
            wanted.append(Condition(reindex.node(condition.node, condition.axes), condition.axes))
        return wanted

    def _hangs(self, condition: Condition, window: Window) -> bool:
        """Whether a condition asks anything of what an index is a sum of, or is a digit of."""
        known = set(nodes_in([condition.node]))
        position = window.solved.position
        digits = [] if position is None else position.terms
        for var in (*summed([window.solved, *window.taps]), *digits):
            if var.kind == "lane":
                if var.key[0] in condition.axes:
                    return True
            elif (var.node if var.region is None else var.region.iv) in known:
                return True
        return False

    def _mask(self, wanted: list[Condition]) -> Node | None:
        result: Node | None = None
        for condition in wanted:
            result = self.g.both(result, lift(self.g, condition.node, condition.axes, self.kept))
        return result

    def _stored(self, reindex: Reindex, moved: list[Position], node: Node, axes: Axes) -> Node:
        """Where the program at the new positions keeps a value: its number, then the place in its block."""
        g = self.g
        name = f"`{node.hint or 'a value'}`"
        divided = NotTurned("inner", f"{name} took a loop, in programs that are split")
        halves: dict[Node | None, Node] = {}
        for position in moved:
            if position.axis is not None and position.axis not in axes:
                if position.programs:  # lanes stand in several programs, and each has another value
                    raise NotTurned("inner", f"{name} took a loop, one value a program")
                continue
            if position.equal is not None:
                raise divided
            whole = next(place.node for place in reindex.places if place.terms is position.terms)
            for var in position.terms:
                part = whole
                if position.block is not None:
                    op = "mod" if var.kind == "lane" else "floordiv"
                    part = g.make(op, (whole, position.block))
                halves[var.node] = lift(g, part, (position.axis,), axes)
        total: Node | None = None
        for one, count in self.programs.numbered:
            value = self.tiles.node(one)
            value = halves.get(value, value)
            if any(n in halves for n in nodes_in([value]) if n.op == "vpid"):
                raise divided
            total = g.cast(value, "int64") if total is None else g.add(g.mul(total, count), value)
        assert total is not None
        for at, dim in enumerate(node.shape):
            lane = g.make("arange", (g.const(0), dim), {}, "int32", (dim,))
            if axes[at] in reindex.axes:
                if lane not in halves:
                    raise NotTurned("mixed", "it uses the lanes of a block apart from its position")
                lane = halves[lane]
            else:
                lane = lift(g, lane, (axes[at],), axes)
            total = g.add(g.mul(total, dim), lane)
        return total

    def _free(self, gone: set[Var], place: Region) -> None:
        """No loop or branch around the write may depend on what moves, or be nested in another way."""
        nodes = {v.node if v.region is None else v.region.iv for v in gone}
        vanished = {v.region for v in gone if v.region is not None}
        for region in place.chain():
            if region in vanished or region.kind == "top":
                continue
            asked = [n for n in (*(region.bounds or ()), region.cond) if n is not None]
            needed = set(nodes_in([one if one.is_float else self.tiles.node(one) for one in asked]))
            if needed & nodes:
                raise NotTurned("bounds", "a loop or branch around it depends on the position")

    def _text(self, windows: list[Window]) -> str:
        """The proof in a line."""
        parts = []
        for window in windows:
            position = window.solved.position
            assert position is not None
            if position.equal is not None:
                parts.append(f"`{self._name(position)}` counted through all programs and steps")
            if position.summed is not None:
                parts.append(f"lanes of `{self._name(position)}` that share an element added up")
            elif any(not entry.terms for entry in position.entries):
                parts.append(f"`{self._name(position)}` split into the digit of the address and the others")
            if self.shifted and window.low and not window.taps:
                parts.append(f"`{self._name(position)}` from the index and a shift")
            if not window.taps:
                continue
            name = getattr(window.solved.var.node, "hint", None) if len(window.solved.terms) == 1 else None
            taps = ", ".join(self._tap(tap) for tap in window.taps)
            parts.append(f"`{name or self._name(position)}` from the index and the taps {taps}")
        return "; ".join(dict.fromkeys(parts))

    @staticmethod
    def _tap(tap: Entry) -> str:
        node = tap.var.region.iv if tap.var.region is not None else tap.var.node
        assert node is not None
        whole = next((n for n in nodes_in([node]) if n.hint), node)
        return f"`{node.hint}`" if node.hint else f"a digit of `{whole.hint}`"

    # numbers of the traced call

    def _number(self, node: Node | None) -> int | None:
        if node is None:
            return None
        value = self.g.concrete(node, self.traced)
        return value if isinstance(value, int) else None

    def _value(self, monomial: Monomial) -> int | None:
        return self._number(self._monomial(monomial))

    def _monomial(self, monomial: Monomial) -> Node:
        return monomial_node(self.affine, self.g, monomial)


def _is_bounded(reader: Reader, high: Group, low: Group) -> bool:
    """Whether the mask bounds the sum of two dimensions, as the place of a window and the tap in it."""
    both = {var for var, _ in (*high.terms, *low.terms)}
    return any(set(known) == both for known, _, _ in reader.bounds.found)


def _of(position: Position, windows: list[Window]) -> list[Window]:
    """The dimensions of one position, the lowest digit first."""
    mine = [window for window in windows if window.solved.position is position]
    return sorted(mine, key=lambda w: (len(w.solved.low[1]), w.solved.low[0]))


def summed(entries: list[Entry]) -> dict[Var, Monomial]:
    """The variables of a sum of entries, with their factors."""
    return {var: times(m, entry.multiplier) for entry in entries for var, m in entry.terms.items()}


def _joined(high: Group, low: Group) -> Group:
    """Two address dimensions as one, in units of what their strides have in common."""
    common, ids = [], list(high.coefficient[1])
    for i in low.coefficient[1]:
        if i in ids:
            ids.remove(i)
            common.append(i)
    base: Monomial = (1, tuple(common))
    terms = []
    for group in (low, high):
        factor = divide(group.coefficient, base)
        assert factor is not None
        terms += [(var, times(factor, m)) for var, m in group.terms]
    return Group(base, terms)

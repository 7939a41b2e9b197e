"""Operands of an owner kernel's products that another kernel computes once, in front of it.

    for n in range(...):                            for n in range(...):
        d_acc = (d_y * s[None, :]).to(...)              d_acc = tl.load(operand_d_acc + ...)
        d_x_sum += tl.dot(d_acc, w)                     d_x_sum += tl.dot(d_acc, w)

What is scaled, unpacked or converted in front of a product goes through registers, so that none of it is
loaded while earlier tiles are multiplied, and every program along an axis of the grid that it does not hang
on computes it again. A kernel with a program for each tile of the operand stores it, in the type that the
product takes; the owner loads that. A tile lies in one piece, as it is, with all that it has beyond the
matrix: which elements are inside is not asked again, and its rows are aligned whatever the lengths are.

It is done where the loops reach each tile in every call, and where the operand is no larger than what is
loaded for it; or where nothing is loaded for it, it takes functions to make, as a table of cosines does, and
it has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...source import words
from ..ir.graph import Graph
from ..ir.names import suggested
from ..ir.nodes import BYTES, Node, Region, TapeStore, beneath, nodes_in, real
from ..ir.transplant import Graft
from ..ir.values import is_named
from ..prove.affine import Affine, nonzero
from .kept_values import Spill

MOST = 1 << 28  # bytes in the traced call of an operand that nothing is loaded for
_NOT_OF_A_TILE = words("phi loopout vpid npid dot")


@dataclass
class Operand:
    """One that is computed once: the kernel that stores it, and how many programs that has."""

    name: str
    called: str
    kept: Spill
    effects: list
    counts: list[Node]
    line: int | None

    def bytes(self, g: Graph, grid: tuple[int, ...]) -> int:
        """What it takes in the traced call."""
        return g.elements((*self.counts, self.kept.numel), grid) * BYTES[real(self.kept.dtype)]


class Operands:
    """Those of one owner kernel."""

    def __init__(
        self,
        g: Graph,
        name: str,
        grid: list[Node],
        in_kernel: Callable[[Node], Node],
        asked: bool,
        traced: tuple[int, ...],
    ) -> None:
        """`grid`: that of the owner kernel, for the host. `in_kernel`: what the host counts, as a generated
        kernel has it. `asked`: whether to replace any; else `offered` says whether there are some. `traced`:
        the forward's grid in the traced call."""
        self.g, self.name, self.grid, self.in_kernel, self.asked = g, name, grid, in_kernel, asked
        self.traced = traced
        self.ids: set[Node] = set()  # all that the owner kernel has of its programs
        self.steps: set[Node] = set()  # those of them that stand for steps of the forward
        self.made: dict[Node, Operand] = {}
        self.offered = False

    def of_grid(self, owned: Iterable[Node], steps: Iterable[Node], same: bool) -> dict[Node, Node]:
        """The program ids that these values are made of, with their counts for the host. `steps`: those of
        them that are of loops, which are among these where all programs make the `same`."""
        self.ids, self.steps = _told_by(owned), _told_by(steps)
        ids = self.ids if same else self.ids - self.steps
        return {n: self.grid[n.attrs["axis"]] for n in ids}

    def of(self, value: Node, counts: Mapping[Node, Node]) -> Node:
        """What a product takes for an operand; `counts`: of numbers that may tell its tile."""
        if value.op == "permute":
            inner = self.of(value.args[0], counts)
            return value if inner is value.args[0] else self.g.again(value, [inner])
        numbers = self._numbers(value, counts)
        if numbers is None:
            return value
        self.offered = True
        return self._load(value, numbers, counts) if self.asked else value

    def _numbers(self, value: Node, counts: Mapping[Node, Node]) -> list[Node] | None:
        """The numbers of the grid and of loops that tell an operand's tile, if it is one to compute once."""
        if (
            len(value.shape) != 2
            or is_named(value.dtype)
            or not value.is_float
            or BYTES[real(value.dtype)] < 2
        ):
            return None
        if _is_loaded(value) or any(n.op in _NOT_OF_A_TILE for n in nodes_in([value])):
            return None
        numbers = _told_by([value])
        if not all(region.is_loop or self._only_saves_work(region, numbers) for region in _around(value)):
            return None
        again = bool(self.ids - numbers) and any(n.op == "iv" for n in numbers)
        if not again or not numbers <= counts.keys():
            return None
        chosen = any(n.op == "ifout" for n in nodes_in([value]))
        if (chosen or self._largest(value) is None) and not self._is_costly(value, numbers, counts):
            return None
        found = sorted(numbers, key=lambda n: (n.op != "pid", n.attrs.get("axis", 0), n.id))
        affine = Affine(self.g)
        return found if all(affine.uniform(counts[n]) for n in found) else None

    def _only_saves_work(self, branch: Region, numbers: set[Node]) -> bool:
        """Whether a branch leaves out steps that some programs do not make, for a value that all have."""
        inside = branch.parent is not None and branch.parent.is_loop
        return branch.skips and inside and not numbers & self.steps

    def _largest(self, value: Node) -> Node | None:
        """A load of as many elements as the operand has."""
        loads = [n for n in nodes_in([value]) if n.op == "load" and len(n.shape) == 2]
        whole = [n for n in loads if not any(map(self.g.is_one, n.shape))]
        return next((n for n in whole if _told_by([n]) == _told_by([value])), None)

    def _is_costly(self, value: Node, numbers: set[Node], counts: Mapping[Node, Node]) -> bool:
        """Whether an operand that nothing is loaded for takes long to make again, as a table of cosines does,
        and has room. Flags choose alike in all kernels."""
        inside = list(nodes_in([value]))
        if any(n.op == "load" or n.op == "ifout" and not n.attrs["if"].static for n in inside):
            return False
        if not any(n.op == "call" and n.shape for n in inside):
            return False
        sizes = (*(counts[number] for number in numbers), self.g.product(value.shape))
        return self.g.elements(sizes, self.traced) * BYTES[real(value.dtype)] <= MOST

    def _columns_first(self, value: Node) -> bool:
        """Whether neighbours in memory are below each other in what is loaded."""
        load = self._largest(value)
        if load is None or load.shape != value.shape:
            return False
        form = nonzero(Affine(self.g).terms(load.args[1], (0, 1)))
        beside = [index[0] for index, terms in form.items() if len(index) == 1 and terms == {(): 1}]
        lanes = {var.key[0] for var in beside if var is not None and var.kind == "lane"}
        return lanes == {0}

    def _load(self, value: Node, numbers: list[Node], counts: Mapping[Node, Node]) -> Node:
        g = self.g
        if value not in self.made:
            self.made[value] = self._stored(value, numbers, counts)
        kept = self.made[value].kept
        tile: Node | None = None
        for number in numbers:
            at = g.cast(number, "int64")
            tile = at if tile is None else g.add(g.mul(tile, self.in_kernel(counts[number])), at)
        assert tile is not None
        place = self._place(value, tile)
        attrs = {"other": False, "buffer": True}
        load = g.make("load", (g.scratch(kept.name, kept.dtype), place), attrs, value.dtype, value.shape)
        load.hint, load.line, load.reverse = self.made[value].called, value.line, value.reverse
        load.upstream = value.upstream
        return load

    def _place(self, value: Node, tile: Node) -> Node:
        """Where the elements of a tile are."""
        g, (rows, columns) = self.g, value.shape
        row, column = (g.lane(size, axis, 2) for axis, size in enumerate(value.shape))
        lanes = [row, g.mul(column, rows)] if self._columns_first(value) else [g.mul(row, columns), column]
        return g.add(g.add(g.mul(tile, g.product(value.shape)), lanes[0]), lanes[1])

    def _stored(self, value: Node, numbers: list[Node], counts: Mapping[Node, Node]) -> Operand:
        """The kernel that stores an operand, a tile a program."""
        g, taken = self.g, {one.kept.name for one in self.made.values()}
        core = beneath(value, "cast")
        called = core.hint or suggested(core, {})
        name = f"operand_{called}"
        while name in taken:
            name += "_"
        kept = Spill(name, value.dtype, g.product(value.shape))
        with g.at(g.top):
            program = g.intern("pid", (), {"axis": 0, "kernel": f"{self.name}_{name}"}, "int32", ())
            program.hint = "tile"
            first, *others = numbers
            table: dict[Node, Node] = {first: program}
            for number in reversed(others):
                size, left = self.in_kernel(counts[number]), table[first]
                table[number], table[first] = g.make("mod", (left, size)), g.make("floordiv", (left, size))
            for number, made in table.items():
                made.hint = made.hint or number.hint
            graft = Graft(g, table, g.top)
            graft.regions |= dict.fromkeys(value.home.chain(), g.top)
            tile = graft.node(value)
            effect = TapeStore(name, self._place(value, g.cast(program, "int64")), tile, g.top)
        return Operand(
            f"{self.name}_{name}", called, kept, [effect], [counts[n] for n in numbers], value.line
        )


def _is_loaded(value: Node) -> bool:
    """Whether an operand is what is loaded, of as many bytes or more."""
    core = beneath(value, "cast", "permute")
    return core.op == "load" and core.is_float and BYTES[real(core.dtype)] >= BYTES[real(value.dtype)]


def _told_by(values: Iterable[Node]) -> set[Node]:
    """The numbers of the grid and of loops in these values."""
    return {n for n in nodes_in(values) if n.op in ("pid", "iv")}


def _around(value: Node) -> list[Region]:
    """The loops and branches that a value is in."""
    return [region for region in value.home.chain() if region.parent is not None]

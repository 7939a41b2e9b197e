"""Tiles of an adjoint that a loop makes step by step and that products of several gradients take, kept as a
matrix.

    for start in range(0, N, BLOCK):                for start in range(0, N, BLOCK):
        d_z = ...                                       d_z = ...
        d_x += tl.dot(d_z, y)                           tl.store(matrix + row * width + column, d_z)
        atomic_add(d_y + ..., tl.dot(d_z^T, x))     d_x, d_y: products of the matrix, in kernels of their own

A loss over all pairs of rows is of that kind. Each of its gradients is the sum of products with the tiles of
a row, or of a column, and a kernel that owns tiles of one would rebuild all of that: the product in front of
the loss, what is made of it, and what that reads. The main kernel stores each tile once, in the type that the
products take, and is left with no sum of whole rows. The matrix has a row for each of the programs' and a
column for each of the steps', also those beyond the last, so that products add up what they did.

It is done where one axis of the tile is of the programs and the other of the steps, and where all of the
products have kernels of their own then. The matrix costs memory: whether it is worth it is for the tuner to
measure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...errors import readable
from ..ir.graph import Graph
from ..ir.nodes import For, GradWrite, Node, Region, TapeStore, beneath, nodes_in, placed, real
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_number, is_zero
from ..prove.affine import Affine
from ..reverse.sweep import Reverse, writes

MOST = 1 << 30  # bytes of a matrix in the traced call, where it is offered
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Index:
    """The rows and columns of a tile, as the main kernel has them, how many the matrix has, and the axis of
    the tile that rows are along."""

    rows: Node
    columns: Node
    height: Node
    width: Node
    axis: int

    def elements(self, g: Graph, grid: tuple[int, ...]) -> int:
        """How many the matrix has in the traced call."""
        return math.prod(int(g.concrete(n, g.launched(grid)) or 1) for n in (self.height, self.width))


@dataclass(frozen=True)
class StepMatrix:
    """A matrix that the main kernel stores tile by tile; `types`: those that products take."""

    name: str
    types: list[str]
    index: Index

    def read_by(self, effects: list) -> bool:
        """Whether some effects read the matrix."""
        loads = (n for n in nodes_in(effects) if n.op == "load")
        return any(n.args[0].attrs.get("name") == self.name for n in loads)


@dataclass
class _Taken:
    """A product that takes a tile: the write that it is for, of a loop's sum where the loop has one, and the
    loops around it."""

    write: GradWrite
    value: Node
    loops: tuple[For, ...]
    dot: Node
    side: int  # of the operand that is the tile
    summed: bool = False


@dataclass
class _Tile:
    """What is known of a tile: its products, the loop that makes it."""

    node: Node
    products: list[_Taken] = field(default_factory=list)

    @property
    def region(self) -> Region:
        return self.node.home

    @property
    def types(self) -> list[str]:
        """Those that products take it in."""
        return list(dict.fromkeys(one.dot.args[one.side].dtype for one in self.products))


def offers(reverse: Reverse, grid: tuple[int, ...]) -> bool:
    """Whether there may be such tiles, of which the traced call's matrices are not too large."""
    g = reverse.kernel.graph
    known = [(tile, _index(reverse, tile)) for tile in _tiles(reverse) if _loop(reverse, tile) is not None]
    sizes = [index.elements(g, grid) * _bytes(tile.types) for tile, index in known if index is not None]
    return bool(sizes) and sum(sizes) <= MOST


def use(reverse: Reverse, grid: tuple[int, ...]) -> list[StepMatrix]:
    """Store such tiles, and have products read them: writes of those are left in the loops, for owners."""
    g, made = reverse.kernel.graph, dict[str, StepMatrix]()
    for tile in _tiles(reverse):
        found = _matrix(reverse, tile, made.keys())
        if found is not None:
            made[found.name] = found
            size = readable(found.index.elements(g, grid) * _bytes(found.types), "B", 2)
            reason = f"`{found.name}`: stored once for products of several gradients: {size} of scratch"
            reverse.say(tile.node.line, "matrix", "none", reason)
    return list(made.values())


def stays(reverse: Reverse, made: list[StepMatrix]) -> bool:
    """Whether the main kernel is left with something that it would have to read back."""
    return any(one.read_by(writes(reverse.effects)) for one in made)


def _bytes(types: list[str]) -> int:
    """Of an element, where products take these types."""
    return max(BYTES.get(real(one), 8) for one in types)


def _tiles(reverse: Reverse) -> list[_Tile]:
    """The tiles that products of two gradients take."""
    found: dict[Node, _Tile] = {}
    for one in _products(reverse):
        core = _core(one.dot.args[one.side])
        found.setdefault(core, _Tile(core)).products.append(one)
    return [tile for tile in found.values() if len({one.write.base for one in tile.products}) > 1]


def _products(reverse: Reverse) -> Iterator[_Taken]:
    """What gradients add up in loops, where that is a product of a tile that the loop makes."""
    for write, loops in list(placed(reverse.effects, GradWrite)):
        term = _term(write, loops)
        if term is None:
            continue
        value, around, summed = term
        dot = beneath(value, "cast")
        if dot.op != "dot" or len(dot.args) != 2:
            continue
        for side in (0, 1):
            core, other = (_core(dot.args[at]) for at in (side, 1 - side))
            own = core.home.kind == "for" and core.is_float and core.op != "load" and len(core.shape) == 2
            if own and other.op == "load" and any(loop.region is core.home for loop in around):
                yield _Taken(write, value, around, dot, side, summed)


def _term(write: GradWrite, loops: tuple[For, ...]) -> tuple[Node, tuple[For, ...], bool] | None:
    """What a write adds in each step: of its own loops, or of one in front of it that sums it up."""
    end = beneath(write.value, "cast")
    if end.op != "loopout":
        return (write.value, loops, False) if loops else None
    loop = end.attrs["loop"]
    carry = loop.carries[end.attrs["index"]]
    if loops or carry.next is None or carry.next.op != "add" or not is_zero(carry.init):
        return None
    terms = [arg for arg in carry.next.args if arg is not carry.phi]
    return (terms[0], (loop,), True) if len(terms) == 1 else None


def _core(operand: Node) -> Node:
    return beneath(operand, "permute", "cast")


def _matrix(reverse: Reverse, tile: _Tile, taken: Collection[str]) -> StepMatrix | None:
    """The matrix of a tile, stored and read."""
    g, region, loop, index = reverse.kernel.graph, tile.region, _loop(reverse, tile), _index(reverse, tile)
    if index is None or loop is None:
        return None
    hint = tile.node.hint or "d_tile"
    name = f"matrix_{hint}"
    while name in taken:
        name += "_"
    g.reverse, g.line = True, tile.node.line
    with g.at(region):
        row, column = (
            g.along(one, axis, 2) for one, axis in ((index.rows, index.axis), (index.columns, 1 - index.axis))
        )
        place = g.add(g.mul(g.cast(row, "int64"), index.width), column)
        attrs = {"other": False, "buffer": True, "matrix": True}
        base = g.scratch(name, tile.node.dtype)
        load = g.make("load", (base, place), attrs, tile.node.dtype, tile.node.shape)
    load.hint, load.upstream = hint, True
    types = tile.types
    for one in tile.products:
        _read(reverse, one, loop, Rewriter(g, {tile.node: load}.get).node(one.value))
    loop.effects.append(TapeStore(name, place, tile.node, region))
    return StepMatrix(name, types, index)


def _loop(reverse: Reverse, tile: _Tile) -> For | None:
    """The loop that makes a tile in each step, in any order."""
    found = (e for e in reverse.effects if isinstance(e, For) and e.region is tile.region)
    return next((loop for loop in found if loop.order != "reverse"), None)


def _index(reverse: Reverse, tile: _Tile) -> Index | None:
    """Where a tile is in the matrix, if one of its axes is of the programs and the other of the steps."""
    g, bounds, shape = reverse.kernel.graph, tile.region.bounds, tile.node.shape
    programs = {n for n in nodes_in([tile.node]) if n.op == "pid"}
    axes = {_axis_of_steps(tile.region.iv, programs, one) for one in tile.products}
    if bounds is None or len(programs) != 1 or len(axes) != 1:
        return None
    (axis,), (program,), (first, end, step) = axes, programs, bounds
    if axis is None or tile.region.iv is None or not is_zero(first) or not Affine(g).uniform(end):
        return None
    block, size = shape[1 - axis], shape[axis]
    if step is not size and not is_number(step, 1):
        return None
    with g.at(tile.region):
        start = tile.region.iv if step is size else g.mul(tile.region.iv, size)
        columns = g.add(start, g.lane(size, 0, 1))
        rows = g.add(g.mul(program, block), g.lane(block, 0, 1))
        width = g.mul(g.make("cdiv", (end, size)) if step is size else end, size)
        height = g.mul(g.npid(program.attrs["axis"]), block)
    return Index(rows, columns, height, width, 1 - axis)


def _axis_of_steps(step: Node | None, programs: set[Node], one: _Taken) -> int | None:
    """The axis of a tile that a product's loop steps along, as what it is multiplied with says; None if that
    says nothing."""
    operand, other = one.dot.args[one.side], one.dot.args[1 - one.side]
    turned = operand.op == "permute" or beneath(operand, "cast").op == "permute"
    summed = (1 - one.side) ^ turned  # the tile's axis that the product sums over
    told = set(nodes_in([other])) & ({step} | programs)
    if len(told) != 1:
        return None
    return summed if told == {step} else 1 - summed


def _read(reverse: Reverse, one: _Taken, loop: For, value: Node) -> None:
    """Have a write add what the matrix gives; one of a loop's sum is a write of each step then."""
    write = one.write
    value.upstream = True
    if not one.summed:
        write.value = value
        return
    reverse.effects = [effect for effect in reverse.effects if effect is not write]
    loop.effects.append(GradWrite(write.base, write.offset, write.mask, value, loop.region, write.line))

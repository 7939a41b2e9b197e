"""Tiles of an adjoint that a loop makes step by step, and products of several gradients take, as a matrix.

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
products have kernels of their own then. The same is done with a tile that a program has, of two axes of the
grid, where that took a loop and the launch may have no tiles of the backward's own (`own_tiles`). The matrix
costs memory: whether it is worth it is for the tuner to measure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from ...errors import readable
from ..ir.graph import Graph
from ..ir.nodes import BYTES, For, GradWrite, Node, Region, TapeStore, beneath, nodes_in, placed, real
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_number, is_zero
from ..ir.values import takes_loop
from ..prove.affine import Affine
from ..read.trace import Site
from ..reverse.sweep import Reverse, writes
from . import own_tiles

MOST = 1 << 30  # bytes of a matrix in the traced call, where it is offered
# Elements of rows from which on a product for each of a tile's takes an H200 as long as to store it and load
# it twice, in halves: 512 operations and 6 bytes. With 64 and 128 a matrix took up to twice as long.
WIDE = 256


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
        return g.elements((self.height, self.width), grid)


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
    """A product that takes a tile, and the write that adds it up: in each step, or of a loop's sum."""

    write: GradWrite
    value: Node
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


def offers(reverse: Reverse, site: Site) -> bool:
    """Whether there may be such tiles, of which the traced call's matrices are not too large."""
    g, grid = reverse.kernel.graph, site.launch.grid
    tiles = [tile for tile in _tiles(reverse, site) if _effects(reverse, tile) is not None]
    known = [(tile, _index(reverse, tile)) for tile in tiles]
    sizes = [index.elements(g, grid) * _bytes(tile.types) for tile, index in known if index is not None]
    return bool(sizes) and sum(sizes) <= MOST


def use(reverse: Reverse, site: Site) -> list[StepMatrix]:
    """Store such tiles, and have products read them: writes of those are left in the loops, for owners."""
    g, grid, made = reverse.kernel.graph, site.launch.grid, dict[str, StepMatrix]()
    for tile in _tiles(reverse, site):
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


def _tiles(reverse: Reverse, site: Site) -> list[_Tile]:
    """The tiles that products of two gradients take. One that a program has is left to kernels with tiles of
    their own, where the launch may have those: such a kernel keeps it as a matrix already."""
    found: dict[Node, _Tile] = {}
    for one in _products(reverse):
        core = _core(one.dot.args[one.side])
        found.setdefault(core, _Tile(core)).products.append(one)
    taken = [tile for tile in found.values() if len({one.write.base for one in tile.products}) > 1]
    steps = [tile for tile in taken if tile.region.is_loop]
    return steps if steps == taken or own_tiles.of_all(site) is not None else taken


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
            block = core.is_float and core.op != "load" and len(core.shape) == 2
            made = (
                any(loop.region is core.home for loop in around)
                if core.home.kind == "for"
                else (core.home.kind == "top" and takes_loop(core) and not summed)
            )
            if block and made and other.op == "load":
                yield _Taken(write, value, dot, side, summed)


def _term(write: GradWrite, loops: tuple[For, ...]) -> tuple[Node, tuple[For, ...], bool] | None:
    """What a write adds in each step: of its own loops, or of one in front of it that sums it up."""
    end = beneath(write.value, "cast")
    if end.op != "loopout":
        return write.value, loops, False
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
    g, region = reverse.kernel.graph, tile.region
    effects, index = _effects(reverse, tile), _index(reverse, tile)
    if index is None or effects is None:
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
        value = Rewriter(g, {tile.node: load}.get).node(one.value)
        value.upstream = True
        if one.summed:  # a write of each step then
            reverse.effects[:] = [effect for effect in reverse.effects if effect is not one.write]
            write = one.write
            effects.append(GradWrite(write.base, write.offset, write.mask, value, region, write.line))
        else:
            one.write.value = value
    effects.append(TapeStore(name, place, tile.node, region))
    return StepMatrix(name, types, index)


def _effects(reverse: Reverse, tile: _Tile) -> list | None:
    """What is done where a tile is made: in the steps of a loop, in any order, or once."""
    if tile.region is reverse.kernel.graph.top:
        return reverse.effects
    found = (e for e in reverse.effects if isinstance(e, For) and e.region is tile.region)
    return next((loop.effects for loop in found if loop.order != "reverse"), None)


def _index(reverse: Reverse, tile: _Tile) -> Index | None:
    """Where a tile is in the matrix, if one of its axes is of the programs, and the other of the steps or of
    programs too."""
    g, region, shape = reverse.kernel.graph, tile.region, tile.node.shape
    numbers = {n for n in nodes_in([tile.node]) if n.op == "pid"}
    numbers |= {region.iv} if region.iv is not None else set()
    axes = _axes(tile, numbers)
    if axes is None:
        return None
    first, last = sorted(numbers, key=lambda n: (n is region.iv, axes[n]))
    with g.at(region):
        rows, columns = (_along(g, region, n, shape[axes[n]]) for n in (first, last))
    if rows is None or columns is None:
        return None
    return Index(rows[0], columns[0], rows[1], columns[1], axes[first])


def _along(g: Graph, region: Region, number: Node, size: Node) -> tuple[Node, Node] | None:
    """The rows, or columns, of a tile with a number of programs or of steps; and how many there are."""
    if number is not region.iv:
        return g.add(g.mul(number, size), g.lane(size, 0, 1)), g.mul(g.npid(number.attrs["axis"]), size)
    first, end, step = region.bounds or (number, number, number)
    if not is_zero(first) or not Affine(g).uniform(end):
        return None
    if step is size:
        return g.add(number, g.lane(size, 0, 1)), g.mul(g.make("cdiv", (end, size)), size)
    return (g.add(g.mul(number, size), g.lane(size, 0, 1)), g.mul(end, size)) if is_number(step, 1) else None


def _axes(tile: _Tile, numbers: set[Node]) -> dict[Node, int] | None:
    """The axis of a tile along which each of two numbers tells its place: the one that a product sums over is
    told as in what the tile is multiplied with."""
    found: dict[Node, int] = {}
    for one in tile.products:
        operand, other = one.dot.args[one.side], one.dot.args[1 - one.side]
        turned = operand.op == "permute" or beneath(operand, "cast").op == "permute"
        told = numbers.intersection(nodes_in([other]))
        axis = (1 - one.side) ^ turned
        if len(numbers) != 2 or len(told) != 1 or found.setdefault(told.pop(), axis) != axis:
            return None
    return found if sorted(found.values()) == [0, 1] else None

"""Tiles of a backward apart from those that the stub gives a forward that computes a matrix tile by tile.

    pid_m, pid_n    one program a tile, along two axes of the grid or swizzled along one
    rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)        masked: rows < M
    for k in range(tl.cdiv(K, BLOCK_K)): ...              or a loop without a block, as over groups of weights

Where nothing that is stored hangs on the blocks (`prove/blocks.py`), and every access is masked to lie inside
of the matrix, the forward with any other blocks is the same function, and the backward of that one serves: a
backward sums over other axes than the forward, and wants wider tiles for it. The host asks in each call
whether the launch is one of just these tiles, and keeps the forward's blocks where it is not. Programs that
walk a queue of tiles (`tile_queues`) have them all, whatever those are; where none of them is left in the
backward, that has tiles of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir.folding import concrete
from ..ir.graph import Graph
from ..ir.nodes import BYTES, Node, Store, nodes_in, real, walk
from ..ir.rewriter import Rewriter
from ..ir.values import Kernel, is_static
from ..prove.affine import Affine, nonzero
from ..prove.beyond import Beyond
from ..prove.blocks import Blocks, Hangs
from ..read.block_sizes import Blocks as Sizes
from ..read.block_sizes import Grid, Queued
from ..read.block_uses import Uses
from ..read.trace import Site, program_axes
from ..reverse.sweep import writes
from . import block_axes, own_blocks, tile_queues
from .own_blocks import are_given, shared_out
from .programs import row_by_row, tiles_of

_SWIZZLED = 3  # axes that no grid has: rows and columns of tiles that lie along one

# Rows, columns, what is summed over; warps, stages: by bytes of what is multiplied. Of halves a tile of 128
# by 128 has 64 operations for each byte that it loads; of float32 as many stages have room for half as much.
# Which is fastest is for the tuner to measure.
OFFERED = {
    2: (
        (128, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 64, 128, 8, 3), (64, 128, 128, 8, 3),
        (64, 64, 64, 4, 3),
    ),
    4: (
        (128, 128, 32, 8, 3), (128, 32, 128, 8, 3), (32, 128, 128, 8, 3), (128, 64, 32, 4, 3),
        (64, 64, 32, 4, 3),
    ),
}  # fmt: skip


# For a kernel of a gradient's own, with blocks of its own: a wide axis that it owns, another axis that it
# owns, and what it sums over. The gradients of both factors sum over different axes, so that no sizes for
# both of them are wide for each. A product has wide rows of what lies along them in memory for its right
# operand, else wide columns: with halves, 4096 each way and three stages an H200 took 0.214 and 0.254 ms
# for 256 rows and for 256 columns of A B^T, 0.232 and 0.210 ms of A B, 0.233 and 0.219 ms of A^T B
# (bench/results/product-tiles-h200.json).
APART = {2: (256, 128, 64), 4: (128, 128, 32)}


@dataclass(frozen=True)
class Tiles:
    """The blocks of a launch: of both axes of the output, with the arguments that say how long those are, and
    of what is summed over, if that has one; and the axes of the grid."""

    lengths: tuple[tuple[str, str], ...]
    summed: tuple[str, ...]
    axes: tuple[int, ...]
    uses: Uses = field(default_factory=Uses)  # names that the launch does not pass
    table: bool = False  # whether data tells the rows, whose block stays as it is

    @property
    def names(self) -> tuple[str, ...]:
        return (*(block for block, _ in self.lengths), *self.summed)

    def sizes(self, config: dict[str, Any], site: Site) -> Grid | None:
        """What a configuration names, where the traced call is one of these tiles. Those of the forward are
        for all kernels alone. Beside rows of a table, tiles are for what owns gradients there."""
        if self.table and not (config.get("disjoint") or config.get("runs")):
            return None
        given = self.given(site)
        own = {name: int(config.get(name, value)) for name, value in given.items()}
        made = replace(self.grid(site), sizes=own)
        other = own != given or len(own) > 1 and config.get("apart")
        return made if other and made.serves(site.launch) else None

    def given(self, site: Site) -> dict[str, Any]:
        """The sizes that the launch passes."""
        values = {**self.uses.of, **{name: name for name in site.args}}
        return {name: site.args[values[name]].value for name in dict.fromkeys(self.names)}

    def grid(self, site: Site) -> Grid:
        """The tiles as the launch has them."""
        return Grid(
            self.given(site), "", -1, site.lines, lengths=self.lengths, axes=self.axes, uses=self.uses
        )


@dataclass(frozen=True)
class QueuedTiles:
    """The blocks of a launch whose programs walk a queue of tiles: rows, columns and what is summed over."""

    names: tuple[str, str, str]

    def sizes(self, config: dict[str, Any], site: Site) -> Queued | None:
        """What a configuration names, where it is anything else, or is for the tiles of all kernels alone."""
        given = {name: site.args[name].value for name in self.names}
        own = {name: int(config.get(name, value)) for name, value in given.items()}
        same = own == given and not config.get("apart")
        return None if same else Queued(own, "", -1, site.lines)


def find(site: Site) -> Tiles | QueuedTiles | None:
    """The tiles of a launch whose backward may choose them."""
    if site.heuristics or site.launch.heuristics or site.tables or site.again is None:
        return None
    dots = any(n.op == "dot" for n in nodes_in(site.kernel.effects))
    if site.kernel.inplace or site.kernel.apart or not dots:
        return None
    named = block_axes.find(site) if site.blocks is None else None
    if named is not None and isinstance(found := _found(site, named), Tiles):
        return found
    return _found(site, site.uses)


def _found(site: Site, uses: Uses) -> Tiles | QueuedTiles | None:
    """The same, where the uses of blocks have names."""
    assert site.again is not None
    kernel = site.again({}, None, uses)
    if any(n.attrs.get("name") in uses.of for met in kernel.graph.met for n in met):
        return None
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    regions = [region for store in stores for region in store.region.chain()]
    if any(r.is_loop for r in regions):
        return None if site.autotuned else _queued(site, kernel)
    if any(r.cond is not None and not is_static(r.cond) for r in regions):
        return None
    axes, table, counts = _numbered(kernel, site)
    if any(n.op == "npid" and n.attrs["axis"] in axes for n in nodes_in(kernel.effects)):
        return None
    rewriter = Rewriter(kernel.graph, table.get)
    written = [
        tuple(n if n is None else rewriter.node(n) for n in (s.offset, s.mask, s.value)) for s in stores
    ]
    nodes = [n for parts in written for n in parts if n is not None]
    shared = {(axis, size.attrs["name"]) for size, axis in shared_out(nodes_in(nodes))}
    rows = dict(sorted(shared))
    summed = {n.attrs["name"] for n in nodes_in(nodes) if n.op == "constexpr" and _steps(n, nodes)}
    told = len(shared) == len(summed) == 1 and not table and _told_by_data(stores)
    if not told and (len(shared) != 2 or len(rows) != 2):
        return None
    if len(summed) > 1 or not table and set(rows) - set(axes):
        return None
    names = {*rows.values(), *summed}
    passed = {uses.of.get(n, n) for n in names}
    tuned = {n for n in passed if isinstance((site.launch.config or {}).get(n), int)}
    if not are_given(site, passed - tuned):
        return None
    lengths = _proven(kernel, rows, names, written)
    if lengths is None or not are_given(site, {name for _, name in lengths}):
        return None
    if table and any(count not in (None, length) for count, length in zip(counts, lengths, strict=True)):
        return None
    return Tiles(lengths, tuple(summed), axes if table else tuple(rows), uses, told)


def _told_by_data(stores: list[Store]) -> bool:
    """Whether each program loads where the rows of its tile are."""
    return bool(stores) and all(
        any(n.op == "load" and not n.shape for n in nodes_in([s.offset])) for s in stores
    )


def _queued(site: Site, kernel: Kernel) -> QueuedTiles | None:
    """The tiles of a queue, if nothing that is stored hangs on what a program has of it."""
    g, found = kernel.graph, tile_queues.of_stores(kernel, program_axes(site), site.launch.grid)
    if found is None:
        return None
    queue, stores = found
    counts = [region.bounds[1] for region in queue.split if region.bounds is not None]
    plain = all(store.kind == "store" and not any(r.cond for r in store.region.chain()) for store in stores)
    if not plain or len(counts) != 2 or any(n.op != "cdiv" or n.args[1].op != "constexpr" for n in counts):
        return None
    table = {
        region.iv: g.pid(_SWIZZLED + at) for at, region in enumerate(queue.split) if region.iv is not None
    }
    rewriter = Rewriter(g, table.get)
    written = [
        tuple(n if n is None else rewriter.node(n) for n in (s.offset, s.mask, s.value)) for s in stores
    ]
    nodes = [n for parts in written for n in parts if n is not None]
    rows = {_SWIZZLED + at: count.args[1].attrs["name"] for at, count in enumerate(counts)}
    lengths = {_SWIZZLED + at: count.args[0] for at, count in enumerate(counts)}
    summed = {n.attrs["name"] for n in nodes_in(nodes) if n.op == "constexpr" and _steps(n, nodes)}
    names = {*rows.values(), *summed}
    if len(names) != 3 or len(summed) != 1 or not are_given(site, names):
        return None
    blocks = Blocks(g, names, rows)
    if any(map(blocks.hangs, lengths.values())):
        return None
    try:
        blocks.every(nodes, bounded=True)
        blocks.joined(written)
        if not blocks.within(_accesses(written, nodes), lengths):
            return None
    except Hangs:
        return None
    row, column = rows.values()
    return QueuedTiles((row, column, min(summed)))


def _accesses(written: list[tuple[Node | None, ...]], nodes: list[Node]) -> list[tuple[Node, Node | None]]:
    """Where a forward stores and loads, with the masks."""
    accesses = [(offset, mask) for offset, mask, _ in written if offset is not None]
    return accesses + [
        (n.args[1], n.args[2] if len(n.args) > 2 else None) for n in nodes_in(nodes) if n.op == "load"
    ]


Count = tuple[str, str] | None  # a block, and the length that is divided by it


def _numbered(kernel: Kernel, site: Site) -> tuple[tuple[int, ...], dict[Node, Node], tuple[Count, Count]]:
    """The axis along which tiles of two axes lie, what stands for the numbers of a tile, and how many the
    kernel takes there to be; else all axes, and nothing more."""
    g, nodes = kernel.graph, list(nodes_in(kernel.effects))
    for axis in program_axes(site):
        pair = tiles_of(g, nodes, g.pid(axis)) or row_by_row(nodes, g.pid(axis))
        counts = [] if pair is None else [_count(count) for _, count in pair]
        if pair is not None and counts[1] is not None:
            table = {node: g.pid(_SWIZZLED + at) for at, (node, _) in enumerate(pair)}
            return (axis,), table, (counts[0], counts[1])
    return tuple(program_axes(site)), {}, (None, None)


def _count(node: Node | None) -> Count:
    """What is divided by a block to give a count of tiles."""
    if node is None or node.op != "cdiv" or any(a.op not in ("param", "constexpr") for a in node.args):
        return None
    length, block = node.args
    return block.attrs["name"], length.attrs["name"]


def _steps(size: Node, nodes: list[Node]) -> bool:
    """Whether a loop goes on by blocks of this size."""
    loops = {n.attrs["loop"] for n in nodes_in(nodes) if n.op == "loopout"}
    bounds = [loop.region.bounds for loop in loops if loop.region.bounds is not None]
    return any(step is size or high.op == "cdiv" and high.args[1] is size for _, high, step in bounds)


def _proven(
    kernel: Kernel, rows: dict[int, str], names: set[str], written: list[tuple[Node | None, ...]]
) -> tuple[tuple[str, str], ...] | None:
    """For the block of each axis how long that axis is, if nothing that is stored hangs on the blocks."""
    blocks = Blocks(kernel.graph, names, rows)
    nodes = [n for parts in written for n in parts if n is not None]
    try:
        blocks.every(nodes, bounded=True)
        blocks.joined(written)
        lengths = blocks.lengths(_accesses(written, nodes))
        if any(len(lengths.get(axis, ())) != 1 for axis in rows):
            return None
        found = {axis: min(lengths[axis]) for axis in rows}
        values = [value for _, _, value in written if value is not None]
        if not all(Beyond(blocks, axis, length).alike(values) for axis, length in found.items()):
            return None
    except Hangs:
        return None
    return tuple((rows[axis], length) for axis, length in found.items())


def offers(site: Site) -> list[dict[str, Any]]:
    """Configurations for the tuner, the likeliest first; few beside those that an autotuner lists."""
    tiles = find(site)
    if tiles is None or isinstance(tiles, Tiles) and tiles.table:
        return []
    every = _likely(tiles.names, _bytes(site.kernel.effects))
    found = [config for config in every if tiles.sizes(config, site)]
    if site.autotuned:
        del found[1:]
    if len(set(tiles.names)) < 2:
        return found
    apart = [config for config in ({**every[0], "apart": 1},) if tiles.sizes(config, site)]
    return apart + [{**config, "apart": 0} for config in found]


def of_table(site: Site, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The same beside rows that a table tells, with what is `asked` for gradients there."""
    tiles = find(site) if site.blocks is None else None
    if not isinstance(tiles, Tiles) or not tiles.table or site.autotuned:
        return []
    every = [{**config, **asked} for config in _likely(tiles.names, _bytes(site.kernel.effects))]
    return [config for config in every if tiles.sizes(config, site)]


def _bytes(effects: list[Any]) -> int:
    """Of the elements that products take, in the traced call."""
    sides = [arg for n in nodes_in(effects) if n.op == "dot" for arg in n.args[:2]]
    return 4 if any(BYTES.get(real(side.dtype), 2) >= 4 for side in sides) else 2


def _likely(blocks: tuple[str, ...], size: int) -> list[dict[str, Any]]:
    """Sizes for blocks, of which some may be one; `size`: of an element, in bytes."""
    names = (*blocks, "num_warps", "num_stages")
    every: list[dict[str, Any]] = []
    for rows, columns, summed, *launched in OFFERED[size]:
        sizes = (rows, columns, *[summed] * (len(blocks) - 2), *launched)
        config = dict(zip(names, sizes, strict=True))
        agrees = all(config[name] == size for name, size in zip(names, sizes, strict=True))
        if agrees and config not in every:
            every.append(config)
    return every


def of_all(site: Site) -> Grid | None:
    """The tiles that a launch has for all kernels of the backward, as they are, where it may have others."""
    if isinstance(site.blocks, Grid):
        return site.blocks
    tiles = find(site)
    if not isinstance(tiles, Tiles) or tiles.table:
        return None
    return tiles.grid(site)


def named(site: Site, own: Grid) -> Site:
    """A launch that is read with tiles' names for its blocks."""
    assert site.again is not None
    kernel = site.again({}, None, own.uses)
    return replace(site, kernel=kernel, args=kernel.args, launch=own.named(site.launch), blocks=own)


def apart(own: Grid | Queued, effects: list[Any], grid: list[Node], g: Graph) -> dict[str, int]:
    """The sizes for a kernel that owns tiles of a gradient, of a launch with tiles of the backward's own: of
    three blocks, or of two beside one that stays.

    Rows of a queue that end where data says have no wide tiles: most of one would be masked off.
    """
    written = [write.value.shape for write in writes(effects)]
    shapes = [{n.attrs["name"] for n in shape if n.op == "constexpr"} for shape in written]
    if isinstance(own, Grid):
        along = {block for block, _ in own.lengths}
    else:
        counted = {n.attrs["name"] for n in nodes_in(grid) if n.op == "constexpr"}
        along = {*list(own.sizes)[:2]} & counted
    alike = bool(shapes) and len(shapes[0]) <= 2 and all(shape == shapes[0] for shape in shapes)
    owned = shapes[0] & set(own.sizes) if alike else set()
    if len(own.sizes) not in (2, 3) or len(owned) != len(own.sizes) - 1 or len(owned & along) > 1:
        return own.sizes
    wide, other, summed = APART[_bytes(effects)]
    by_data = set() if isinstance(own, Grid) else {*list(own.sizes)[:2]} - along
    widest = _widest(effects, g) & owned - by_data or along
    return {n: summed if n not in owned else wide if n in widest else other for n in own.sizes}


def _widest(effects: list[Any], g: Graph) -> set[str]:
    """The block of an axis of a gradient's tile that is best wide, where it is one product of matrices: its
    columns, unless what is summed over lies along neighbours of the right operand."""
    dots = [n for n in nodes_in(effects) if n.op == "dot"]
    shapes = [write.value.shape for write in writes(effects)]
    if len(dots) != 1 or len(shapes) != 1 or dots[0].shape != shapes[0] or len(shapes[0]) != 2:
        return set()
    node, axis = dots[0].args[1], 0
    while node.op in ("cast", "permute"):
        axis = node.attrs["order"][axis] if node.op == "permute" else axis
        node = node.args[0]
    along = node.op == "load" and len(node.shape) == 2 and _step(Affine(g), node.args[1], axis) == 1
    size = shapes[0][0 if along else 1]
    return {size.attrs["name"]} if size.op == "constexpr" else set()


def _step(affine: Affine, offset: Node, axis: int) -> int | None:
    """How far apart neighbours along an axis of a block are in the traced call; None where that is
    unknown."""
    form = nonzero(affine.terms(offset, (0, 1)))
    along = [
        one
        for one in form
        if any(var is not None and var.kind == "lane" and var.key[0] == axis for var in one)
    ]
    if len(along) != 1 or len(along[0]) != 1:
        return None
    total = 0
    for ids, factor in form[along[0]].items():
        known = [concrete(affine.nodes[i], {}) for i in ids]
        if not all(type(value) is int for value in known):
            return None
        total += factor * math.prod(known)
    return total


def chosen(sites: list[Site], config: dict[str, Any]) -> list[Sizes]:
    """The tiles that a configuration gives the backward of launches."""
    return own_blocks.chosen(sites, config, find)

"""Rows of which a program has one in a single block, in tiles that have programs of their own.

    cols = tl.arange(0, BLOCK)        BLOCK a power of two over the row: up to half of the lanes are masked

Where lanes have nothing to do with each other, the backward may give a tile of a row to each program, along
one more axis of the grid:

    cols = tile * BLOCK + tl.arange(0, BLOCK)        BLOCK at most 1024, say

Lanes that are masked off take as long as others; of 11,008 elements in a block of 16,384 a third is. Tiles
that are masked off as a whole have no program, where the kernel's masks tell how long a row is, and programs
that run one after the other have tiles that lie one after the other: along an axis of their own alone, those
of a GEGLU took 4% longer on an H200 (bench/results/row-kernels-h200.json). Which tile is worth it is for the
tuner to measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.kinds import PLAIN
from ..ir.nodes import For, Node, Store, nodes_in, walk
from ..ir.simplify import is_zero
from ..prove.masks import parts
from ..read.block_sizes import Blocks, Tiles
from ..read.trace import Site, grid_written

OFFERED = ((1024, 4), (2048, 8), (2048, 4), (4096, 8))  # elements, warps
AXES = 3
_ALONE = PLAIN | {"arange", "isnone"}


@dataclass(frozen=True)
class Row:
    """A block of a launch that is a row, the axis of the grid for its tiles, and the argument that says how
    long the row is, where there is one."""

    block: str
    axis: int
    length: str | None


def find(site: Site) -> Row | None:
    """The row of a launch that may be cut into tiles."""
    kernel = site.kernel
    if site.autotuned or site.launch.heuristics or site.tables or kernel.inplace or kernel.apart:
        return None
    effects = list(walk(kernel.effects))
    nodes = list(nodes_in(kernel.effects))
    lanes = [n for n in nodes if n.op == "arange"]
    blocks = {n.args[1] for n in lanes}
    if len(blocks) != 1 or not all(n.op in _ALONE for n in nodes) or any(isinstance(e, For) for e in effects):
        return None
    (block,) = blocks
    if block.op != "constexpr" or block.attrs["name"] not in site.given_names:
        return None
    alone = all(n in lanes or block not in n.args for n in nodes) and all(is_zero(n.args[0]) for n in lanes)
    stores = [e for e in effects if isinstance(e, Store)]
    whole = all(e.kind == "store" and e.offset.shape == (block,) for e in stores)
    if not (alone and whole and all(n.shape in ((), (block,)) for n in nodes)):
        return None
    axis = _free(site)
    asked = {n.attrs["axis"] for n in nodes if n.op in ("pid", "npid")}
    if axis is None or axis in asked:
        return None
    return Row(block.attrs["name"], axis, _length(site, block, stores))


def _length(site: Site, block: Node, stores: list[Store]) -> str | None:
    """The argument below which every access to the row is masked to lie."""
    accessed = [(n, n.args[2] if len(n.args) > 2 else None) for n in nodes_in(stores) if n.op == "load"]
    masks = [mask for node, mask in accessed if node.shape == (block,)] + [store.mask for store in stores]
    bounds = [
        {
            part.args[1].attrs["name"]
            for part in parts(mask)
            if part.op == "compare" and part.attrs["cmp"] == "<" and part.args[0].op == "arange"
            if part.args[1].op in ("param", "constexpr")
        }
        for mask in masks
    ]
    shared = set.intersection(*bounds) & set(site.given_names)
    return min(shared, default=None)


def _free(site: Site) -> int | None:
    """The first axis of a grid that has one program in every call."""
    _, written = grid_written(site)
    for axis in range(AXES):
        entry = written[axis] if axis < len(written) == len(site.launch.grid) else None
        if axis >= len(site.launch.grid) or getattr(entry, "value", None) == 1:
            return axis
    return None


def offers(site: Site) -> list[dict[str, Any]]:
    """Configurations for the tuner, the likeliest first."""
    found = find(site)
    return [] if found is None else [{found.block: size, "num_warps": warps} for size, warps in OFFERED]


def chosen(sites: list[Site], config: dict[str, Any]) -> list[Blocks]:
    """The tiles that a configuration gives the backward of launches."""
    tiles: list[Blocks] = []
    for site in sites:
        row = find(site)
        if row is not None and row.block in config:
            size = int(config[row.block])
            tiles.append(Tiles({row.block: size}, row.block, row.axis, site.lines, row.length))
    return tiles

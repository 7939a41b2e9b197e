"""Rows of which a program has one in a single block, in tiles that have programs of their own.

    cols = tl.arange(0, BLOCK)        BLOCK a power of two over the row: up to half of the lanes are masked

Where lanes have nothing to do with each other, the backward may give a tile of a row to each program, along
one more axis of the grid:

    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)        BLOCK at most 1024, say

Lanes that are masked off take as long as others; of 11,008 elements in a block of 16,384 a third is. Which
tile is worth it is for the tuner to measure.
"""

from __future__ import annotations

from typing import Any

from ..ir.kinds import PLAIN
from ..ir.nodes import For, Store, nodes_in, walk
from ..ir.simplify import is_zero
from ..read.trace import Blocks, Site, grid_written

OFFERED = ((1024, 4), (2048, 8), (2048, 4), (4096, 8))  # elements, warps
AXES = 3
_ALONE = PLAIN | {"arange", "isnone"}


def find(site: Site) -> tuple[str, int] | None:
    """The block of a launch that is a row and may be cut into tiles, and the axis of the grid for them."""
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
    return None if axis is None or axis in asked else (block.attrs["name"], axis)


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
    return [] if found is None else [{found[0]: size, "num_warps": warps} for size, warps in OFFERED]


def chosen(sites: list[Site], config: dict[str, Any]) -> list[Blocks]:
    """The tiles that a configuration gives the backward of launches."""
    tiles = []
    for site in sites:
        found = find(site)
        if found is not None and found[0] in config:
            block, axis = found
            tiles.append(Blocks({block: int(config[block])}, block, axis, site.lines, spread=True))
    return tiles

"""Wider blocks of a backward whose programs have a block of a row each, or of all elements.

    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)        masked: cols < D

Where lanes have nothing to do with each other and every access is masked to lie inside of the row, the
forward with any other block is the same function, and the backward of that one serves. With a block of 128
each lane has one element, and a launch is over before its programs have all begun. The host asks in each call
whether the launch is one of just these blocks (`read/trace.py`, Grid).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.nodes import Store, nodes_in, walk
from ..ir.values import is_static
from ..prove.beyond import Beyond
from ..prove.blocks import Blocks, Hangs
from ..read.block_sizes import Blocks as Sizes
from ..read.block_sizes import Grid
from ..read.trace import Site, program_axes
from . import own_blocks
from .own_blocks import are_given, shared_out

OFFERED = (1024, 512)
ELSEWHERE = ("dot", "reduce", "scan", "combine", "npid")  # lanes that meet, or programs that are counted


@dataclass(frozen=True)
class Lanes:
    """The block of a launch, the argument that says how long a row is, and the axis of the grid."""

    block: str
    length: str
    axis: int

    def sizes(self, config: dict[str, Any], site: Site) -> Grid | None:
        """What a configuration names, where the traced call is one of these blocks."""
        given = site.args[self.block].value
        own = int(config.get(self.block, given))
        lengths = ((self.block, self.length),)
        made = Grid({self.block: own}, "", -1, site.lines, lengths=lengths, axes=(self.axis,))
        return made if own != given and made.serves(site.launch) else None


def find(site: Site) -> Lanes | None:
    """The block of a launch whose backward may choose it."""
    if site.autotuned or site.heuristics or site.launch.heuristics or site.tables or site.again is None:
        return None
    if site.kernel.inplace or site.kernel.apart:
        return None
    kernel = site.again({}, None)
    every = list(nodes_in(kernel.effects))
    shared = {(axis, size.attrs["name"]) for size, axis in shared_out(every)}
    if len(shared) != 1 or any(n.op in ELSEWHERE for n in every):
        return None
    ((axis, name),) = shared
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    blocks = Blocks(kernel.graph, (name,), {axis: name})
    regions = [region for store in stores for region in store.region.chain()]
    if axis not in program_axes(site) or any(
        r.cond is not None and not is_static(r.cond) or r.is_loop and blocks.region_hangs(r) for r in regions
    ):
        return None
    values = [n for s in stores for n in (s.offset, s.mask, s.value) if n is not None]
    accesses = [(s.offset, s.mask) for s in stores]
    accesses += [(n.args[1], n.args[2] if len(n.args) > 2 else None) for n in every if n.op == "load"]
    try:
        blocks.every(values, bounded=True)
        blocks.joined([(s.offset, s.mask, s.value) for s in stores])
        placed = blocks.every([s.offset for s in stores])
        found = blocks.lengths(accesses).get(axis, set())
        alike = len(found) == 1 and Beyond(blocks, axis, min(found)).alike([s.value for s in stores])
    except Hangs:
        return None
    alike = alike and all(("row", axis) in labels for labels in placed)  # a lane is of one program
    return Lanes(name, min(found), axis) if alike and are_given(site, {name, *found}) else None


def offers(site: Site) -> list[dict[str, Any]]:
    """Configurations for the tuner: wider blocks than the forward's, of which not half is masked off."""
    lanes = find(site)
    if lanes is None:
        return []
    given, length = site.args[lanes.block].value, site.args[lanes.length].value
    sizes = [size for size in OFFERED if given < size < 2 * length]
    return [{lanes.block: size} for size in sizes if lanes.sizes({lanes.block: size}, site)]


def chosen(sites: list[Site], config: dict[str, Any]) -> list[Sizes]:
    """The blocks that a configuration gives the backward of launches."""
    return own_blocks.chosen(sites, config, find)

"""Block sizes of a backward apart from those that the stub gives the forward.

    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)        both blocks may be one
    for start in range(0, N, BLOCK_N): ...

Where nothing that a forward stores hangs on the size of its blocks (`prove/blocks.py`), the forward with
other blocks is the same function, and the backward of that one serves. Programs share the same rows out: the
host asks in each call whether they are a multiple of the backward's block, and keeps the forward's blocks
where they are not.

Where every access to rows is masked to lie below an argument, programs beyond it have nothing to do. Then
the rows are rounded up to whole blocks of the backward, if those that do not exist are alike
(`prove/beyond.py`). A copy of the forward that saves something is launched with as many programs more: such
rows have what the forward would have computed for them, neither nothing nor garbage. Which sizes are worth it
is for the tuner to measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..ir.nodes import BYTES, For, Node, Store, beneath, nodes_in, real, walk
from ..ir.values import Kernel, is_static
from ..prove.beyond import Beyond
from ..prove.blocks import Blocks, Hangs
from ..read.block_sizes import Blocks as Sizes
from ..read.trace import Site, program_axes
from ..reverse import normalised, running_maxima

# Rows, columns, warps. For heads of 64 half numbers, sm_90 spills nothing in the first two, some in the last.
OFFERED = ((64, 64, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8), (64, 128, 4))
# Of rows and columns alike, and warps; sixteen of those where eight have too few registers.
ALIKE = ((128, 8), (64, 8), (64, 16), (64, 4), (32, 4))
REGISTERS = 65536  # of 32 bits, that eight warps have
FULL = (
    0.5  # of them, that may hold sums and a tile: with .56, 64 rows of 512, an H200 took five times as long
)
SHARED = 227 << 10  # bytes of shared memory that a program may have on sm_90


@dataclass(frozen=True)
class Own:
    """The parameters that a backward may have others of: rows, along a grid axis, and columns of a loop; they
    may be one. `length`: an argument from which on rows have nothing to do. Of the traced call, `width`: of
    the widest rows, beside the blocks; `bytes`: of their elements."""

    rows: str
    axis: int
    columns: str
    length: str | None
    width: int
    bytes: int

    def sizes(self, config: dict[str, Any], site: Site) -> Sizes | None:
        """The blocks that a configuration names, where they serve the traced call."""
        given = {name: site.args[name].value for name in (self.rows, self.columns)}
        own = {name: int(config.get(name, value)) for name, value in given.items()}
        made = Sizes(own, self.rows, self.axis, site.lines, self.length)
        return None if own == given or made.launch(site.launch) is site.launch else made

    def fits(self, size: int, warps: int, sums: bool = True) -> bool:
        """Whether registers can hold sums of whole rows, if there are any, and a tile."""
        return size * (self.width * sums + size) <= FULL * REGISTERS * warps / 8

    def stages(self, size: int) -> int:
        """So many blocks of columns shared memory can hold, beside one of rows and a tile."""
        return (SHARED // (size * self.bytes) - size) // self.width - 1


def find(site: Site) -> Own | None:
    """The blocks of a launch that its backward may choose: those of one range of rows and one of columns."""
    if site.autotuned or site.heuristics or site.launch.heuristics or site.tables or site.again is None:
        return None
    if (
        site.kernel.inplace
        or site.kernel.apart
        or not any(n.op == "dot" for n in nodes_in(site.kernel.effects))
    ):
        return None
    kernel = site.again({}, None)
    normalised.undivide(kernel, [])
    running_maxima.detach(kernel, [])
    loops = [e for e in walk(kernel.effects) if isinstance(e, For)]
    loops += [n.attrs["loop"] for n in nodes_in(kernel.effects) if n.op == "loopout"]
    columns = {l.region.bounds[2] for l in loops if l.region.bounds is not None}
    columns = {n for n in columns if n.op == "constexpr"}
    shared = set(shared_out(nodes_in(kernel.effects)))
    shared = {(size, axis) for size, axis in shared if size not in columns} or shared
    if len(columns) != 1 or len(shared) != 1:
        return None
    ((size, axis),), (column,) = shared, columns
    rows, names = size.attrs["name"], {size.attrs["name"], column.attrs["name"]}
    first = program_axes(site)[:1] == [axis]  # what is saved lies by programs, neighbours beside each other
    if not are_given(site, names) or not first:
        return None
    blocks = Blocks(kernel.graph, names, {axis: rows})
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    if not _proven(blocks, stores, axis):
        return None
    lengths = _lengths(blocks, kernel, stores, axis) - kernel.either
    length = min((name for name in lengths if are_given(site, {name})), default=None)
    return Own(rows, axis, column.attrs["name"], length, *_rows(site, names))


def are_given(site: Site, names: set[str]) -> bool:
    """Whether arguments are whole numbers that the launch passes."""
    return all(n in site.given_names and isinstance(site.args[n].value, int) for n in names)


def shared_out(nodes: Iterable[Node]) -> Iterator[tuple[Node, int]]:
    """The block sizes of which programs have one each, with their axis."""
    known = set(nodes)
    sizes = {n.args[1] for n in known if n.op == "arange"}
    for node in known:
        for number, size in (node.args, node.args[::-1]) if node.op == "mul" else ():
            pid = beneath(number, "cast")
            if pid.op == "pid" and size.op == "constexpr" and size in sizes:
                yield size, pid.attrs["axis"]


def _proven(blocks: Blocks, stores: list[Store], axis: int) -> bool:
    """Whether nothing that the forward stores hangs on its blocks, and each row is stored by one program."""
    conditions = [r.cond for s in stores for r in s.region.chain() if r.cond is not None]
    if any(r.is_loop for s in stores for r in s.region.chain()):
        return False
    if not all(is_static(cond) and not blocks.hangs(cond) for cond in conditions):
        return False
    try:
        blocks.every([n for s in stores for n in (s.offset, s.mask, s.value) if n is not None], bounded=True)
        blocks.joined([(s.offset, s.mask, s.value) for s in stores])
        placed = blocks.every([s.offset for s in stores])
    except Hangs:
        return False
    return all(("row", axis) in labels for labels in placed)


def _lengths(blocks: Blocks, kernel: Kernel, stores: list[Store], axis: int) -> set[str]:
    """The arguments below which every access to rows is masked to lie, where rows beyond are alike: programs
    that have such rows alone do nothing, and end."""
    loads = {
        (n.args[0], n.args[1], n.args[2] if len(n.args) > 2 else None)
        for n in nodes_in(stores)
        if n.op == "load"
    }
    if not loads.issuperset(kernel.loaded):  # what is read for nothing is not proven to be within its bounds
        return set()
    if any(isinstance(e, For) and e.cond is not None for e in walk(kernel.effects)):
        return set()
    accesses = [(s.offset, s.mask) for s in stores] + [(offset, mask) for _, offset, mask in loads]
    values = [s.value for s in stores]
    try:
        found = blocks.lengths(accesses).get(axis, set())
        return {name for name in found if Beyond(blocks, axis, name).alike(values)}
    except Hangs:
        return set()


def _rows(site: Site, names: set[str]) -> tuple[int, int]:
    """The longest axis of what is multiplied in the traced call, but for the blocks; bytes of an element."""
    g = site.kernel.graph
    sides = [side for n in nodes_in(site.kernel.effects) if n.op == "dot" for side in n.args[:2]]
    known = [g.concrete(d) for side in sides for d in side.shape if d.attrs.get("name") not in names]
    width = max((size for size in known if isinstance(size, int)), default=1)
    return width, max(BYTES.get(real(side.dtype), 2) for side in sides)


def offers(own: Own, site: Site, sums: bool = True) -> list[dict[str, Any]]:
    """Configurations for the tuner, the likeliest first. `sums`: the backward has those of whole rows."""
    if own.rows == own.columns:
        given = site.launch.num_stages
        fitting = [
            (size, warps, own.stages(size))
            for size, warps in ALIKE
            if own.fits(size, warps, sums) and not (warps == 16 and own.fits(size, 8, sums))
        ]
        found = [
            {own.rows: size, "num_warps": warps, **({"num_stages": most} if most < given else {})}
            for size, warps, most in fitting
            if most > 0
        ]
    else:
        found = [{own.rows: m, own.columns: n, "num_warps": w} for m, n, w in OFFERED]
    return [config for config in found if own.sizes(config, site)]


def fewer(site: Site) -> tuple[dict[str, Any], tuple[int, ...]] | None:
    """The likeliest configuration where it leaves fewer programs than the traced call has, and its grid."""
    own = find(site) if site.blocks is None else None
    found = [] if own is None else offers(own, site)[:1]
    sizes = own.sizes(found[0], site) if own is not None and found else None
    grid = site.launch.grid if sizes is None else sizes.launch(site.launch).grid
    return (found[0], grid) if math.prod(grid) < math.prod(site.launch.grid) else None


def _named(config: dict[str, Any]) -> set[str]:
    """The constexprs that a configuration may name, by themselves or by an axis that they are for."""
    return {*config, *(name.rpartition("_")[0] for name in config)}


def chosen(sites: list[Site], config: dict[str, Any], find: Callable[[Site], Any] = find) -> list[Sizes]:
    """The blocks that a configuration gives the backward of launches; `find`: what may be varied of one."""
    found = []
    for site in sites:
        if {name for name, arg in site.args.items() if arg.kind == "constexpr"} & _named(config):
            own = find(site)
            sizes = None if own is None else own.sizes(config, site)
            found += [] if sizes is None else [sizes]
    return found

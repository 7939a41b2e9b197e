"""Block sizes of a backward apart from those that the stub gives the forward.

Where nothing that a forward stores hangs on the size of its blocks (`prove/blocks.py`), the forward with
other blocks is the same function, and the backward of that one serves. Programs share the same rows out: the
backward's block of rows divides the forward's, which the host asks in each call, and keeps the forward's
blocks where it does not. Which sizes are worth it is for the tuner to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..ir.nodes import For, Node, Store, beneath, nodes_in, walk
from ..ir.values import Kernel, is_static
from ..prove.blocks import Blocks, Hangs
from ..read.trace import Blocks as Sizes
from ..read.trace import Site, program_axes
from ..reverse import running_maxima

# Rows, columns, warps. For heads of 64 half numbers, sm_90 spills nothing in the first two, some in the last.
OFFERED = ((64, 64, 4), (64, 128, 8), (128, 64, 8), (128, 128, 8), (64, 128, 4))


@dataclass(frozen=True)
class Own:
    """The parameters that a backward may have others of: rows, along a grid axis, and columns of a loop."""

    rows: str
    axis: int
    columns: str

    def sizes(self, config: dict[str, Any], site: Site) -> Sizes | None:
        """The blocks that a configuration names, where they serve the traced call."""
        given = {name: site.args[name].value for name in (self.rows, self.columns)}
        own = {name: int(config.get(name, value)) for name, value in given.items()}
        if own == given or given[self.rows] % own[self.rows]:
            return None
        return Sizes(own, self.rows, self.axis, site.lines)


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
    running_maxima.detach(kernel, [])
    loops = [e for e in walk(kernel.effects) if isinstance(e, For)]
    loops += [n.attrs["loop"] for n in nodes_in(kernel.effects) if n.op == "loopout"]
    columns = {l.region.bounds[2] for l in loops if l.region.bounds is not None}
    columns = {n for n in columns if n.op == "constexpr"}
    shared = shared_out(nodes_in(kernel.effects))
    rows = {(n.attrs["name"], axis) for n, axis in shared if n not in columns}
    if len(columns) != 1 or len(rows) != 1:
        return None
    ((name, axis),), (column,) = rows, columns
    own = Own(name, axis, column.attrs["name"])
    given = all(
        n in site.given_names and isinstance(site.args[n].value, int) for n in (own.rows, own.columns)
    )
    first = program_axes(site)[:1] == [axis]  # what is saved lies by programs, neighbours beside each other
    return own if given and first and _proven(kernel, own) else None


def shared_out(nodes: Iterable[Node]) -> Iterator[tuple[Node, int]]:
    """The block sizes of which programs have one each, with their axis."""
    known = set(nodes)
    sizes = {n.args[1] for n in known if n.op == "arange"}
    for node in known:
        for factor, size in (node.args, node.args[::-1]) if node.op == "mul" else ():
            pid = beneath(factor, "cast")
            if pid.op == "pid" and size.op == "constexpr" and size in sizes:
                yield size, pid.attrs["axis"]


def _proven(kernel: Kernel, own: Own) -> bool:
    """Whether nothing that the forward stores hangs on its blocks."""
    blocks = Blocks(kernel.graph, (own.rows, own.columns), {own.axis: own.rows})
    stores = [e for e in walk(kernel.effects) if isinstance(e, Store)]
    conditions = [r.cond for s in stores for r in s.region.chain() if r.cond is not None]
    if any(r.is_loop for s in stores for r in s.region.chain()):
        return False
    if not all(is_static(cond) and not blocks.hangs(cond) for cond in conditions):
        return False
    try:
        blocks.every([n for s in stores for n in (s.offset, s.mask, s.value) if n is not None], bounded=True)
    except Hangs:
        return False
    return True


def offers(own: Own, site: Site) -> list[dict[str, Any]]:
    """Configurations for the tuner, the likeliest first."""
    found = [{own.rows: m, own.columns: n, "num_warps": w} for m, n, w in OFFERED]
    return [config for config in found if own.sizes(config, site)]


def chosen(sites: list[Site], config: dict[str, Any], find: Callable[[Site], Any] = find) -> list[Sizes]:
    """The blocks that a configuration gives the backward of launches; `find`: what may be varied of one."""
    found = []
    for site in sites:
        if {name for name, arg in site.args.items() if arg.kind == "constexpr"} & set(config):
            own = find(site)
            sizes = None if own is None else own.sizes(config, site)
            found += [] if sizes is None else [sizes]
    return found

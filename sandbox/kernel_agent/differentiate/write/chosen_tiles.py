"""The host's text that chooses the tiles of a backward: those of its own, or those of the forward.

    ctx.tiles = grid[0] == triton.cdiv(M, BLOCK_M) and grid[1] == triton.cdiv(N, BLOCK_N) and K % 16 == 0
    if ctx.tiles:
        grid, BLOCK_M, BLOCK_N, BLOCK_K = (triton.cdiv(M, 128), triton.cdiv(N, 128)), 128, 128, 64
        num_warps = 8

Where a launch is not one of just these tiles the forward's serve alone, and of rows that are not aligned
(`aligned_rows`) large tiles take longer: such calls have the launch's warps and stages too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from ...launches import OPTION_DEFAULTS
from ..ir.nodes import Node, nodes_in
from ..ir.rewriter import Rewriter
from ..read.block_sizes import Grid, Queued
from ..read.trace import Site
from ..schedule import aligned_rows
from .line_breaks import broken, tuple_text

if TYPE_CHECKING:
    from .section import FunctionText


class ChosenTiles:
    """What a Function says of the tiles of its launch."""

    def __init__(self, text: FunctionText) -> None:
        self.text, self.site = text, text.site
        self.apart = False  # whether kernels of the backward have tiles of their own each
        self.backward: list | None = None  # its effects, where operands of products are computed once

    @property
    def own(self) -> Grid | Queued | None:
        own = self.site.blocks
        return own if isinstance(own, Grid | Queued) else None

    @cached_property
    def strides(self) -> list[Node]:
        """What is asked of the rows that products read."""
        return [] if self.own is None else aligned_rows.strides(self.site, self.own.sizes, self.backward)

    @property
    def options(self) -> dict[str, tuple[str | int, int]]:
        """Warps and stages that calls with the forward's tiles have others of: theirs, and the backward's."""
        site = self.site
        if not isinstance(self.own, Grid) and not self.strides:
            return {}
        found: dict[str, tuple[str | int, int]] = {}
        if site.warps and site.launched_warps != site.launch.num_warps:
            passed = "num_warps" in site.given_names and not site.autotuned
            found["num_warps"] = ("num_warps" if passed else site.launched_warps, site.launch.num_warps)
        theirs = "num_stages" if has_few_stages(site) else OPTION_DEFAULTS["num_stages"]
        if site.stages not in (None, theirs):
            found["num_stages"] = (theirs, site.stages)
        return {name: pair for name, pair in found.items() if name not in site.params}

    def lines(self, own: Grid | Queued, named: dict[str, list[str]]) -> list[str]:
        """What the forward does behind its launch. `named`: names of blocks that this has by others."""
        conds, told = [], []
        if isinstance(own, Grid):
            counts = _counts(own, {block: block for block, _ in own.lengths})
            conds = [f"grid[{axis}] == {count}" for axis, count in zip(own.axes, counts, strict=True)]
            told = ["the launch is one of just these tiles"]
        if self.strides:
            asking = self.text.only_asking()
            conds += [f"{asking.expr(n, 12)} % {aligned_rows.ALIGNED} == 0" for n in self.strides]
            told += ["rows are aligned"]
        if not conds:
            return broken(f"{self._tiled(own, own.sizes)}  # blocks of the backward's own")
        before = [f"{' = '.join(names)} = {text}" for text, names in named.items()]
        options = self.options
        theirs = {name: number for name, (number, _) in options.items() if number != name}
        before += [_assigned(theirs)] if theirs else []
        chosen = [self._tiled(own, own.sizes)]
        chosen += [_assigned({name: ours for name, (_, ours) in options.items()})] if options else []
        lines = [part for line in before for part in broken(line)]
        lines += [f"        # blocks of the backward's own, where {' and '.join(told)}"]
        same, kept = " and ".join(conds), self.apart or bool(self.strides)
        lines += broken(f"ctx.tiles = {same}") if kept else []
        lines += broken("if ctx.tiles:" if kept else f"if {same}:")
        return lines + [part for line in chosen for part in broken(line, 12)]

    def _tiled(self, own: Grid | Queued, sizes: dict[str, int]) -> str:
        """From here on there are these tiles."""
        if not isinstance(own, Grid):
            return _assigned(sizes)
        grid = {axis: f"grid[{axis}]" for axis in range(len(self.site.launch.grid))}
        grid |= dict(zip(own.axes, _counts(own, sizes), strict=True))
        return _assigned({"grid": tuple_text(list(grid.values())), **sizes})

    def of_step(self, own: Grid | Queued, sizes: dict[str, int], asked: list[str], again: bool) -> list[str]:
        """The same before one launch of the backward, in calls where the host finds what is asked. `again`:
        in others those of all, as an earlier launch may have had others. A queue has any tiles."""
        same = []
        if isinstance(own, Grid) or self.strides:
            self.apart, same = True, ["ctx.tiles"]
            for _, length in own.lengths if isinstance(own, Grid) else ():
                self.text.value(length)
        if sizes == own.sizes:
            theirs = [*(f"if {one}:" for one in same), f"{'    ' * len(same)}{self._tiled(own, sizes)}"]
            return theirs if again else []
        told, conds = "  # tiles of this kernel's own", [*same, *asked]
        if not conds:
            return [f"{self._tiled(own, sizes)}{told}"]
        lines = [f"if {' and '.join(conds)}:{told}", f"    {self._tiled(own, sizes)}"]
        others = f"elif {same[0]}:" if same else "else:"
        return [*lines, others, f"    {self._tiled(own, own.sizes)}"] if again and asked else lines

    def programs(self, own: Grid | Queued, sizes: dict[str, int], grid: list[Node]) -> str | None:
        """How many programs a kernel that owns tiles has with such sizes, if the host knows."""
        g = self.site.kernel.graph
        consts = Rewriter(g, lambda n: g.const(sizes[n.attrs["name"]]) if _sized(n, sizes) else None)
        counts = []
        for count in grid:
            if count.op == "npid" and isinstance(own, Grid) and count.attrs["axis"] in own.axes:
                counts.append(_counts(own, sizes)[own.axes.index(count.attrs["axis"])])
            elif any(n.op == "npid" for n in nodes_in([count])):
                return None
            else:
                counts.append(self.text.expr(consts.node(count), 11))
        return " * ".join(counts)


def has_few_stages(site: Site) -> bool:
    """Whether the backward has as few stages as the launch passes, where it does not choose them."""
    return "num_stages" in site.given_names and site.launch.num_stages < OPTION_DEFAULTS["num_stages"]


def _assigned(values: Mapping[str, object]) -> str:
    return f"{', '.join(values)} = {', '.join(map(str, values.values()))}"


def _sized(node: Node, sizes: dict[str, int]) -> bool:
    return node.op == "constexpr" and node.attrs["name"] in sizes


def _counts(own: Grid, sizes: Mapping[str, object]) -> list[str]:
    """Programs along the axes of tiles."""
    found = [f"triton.cdiv({length}, {sizes[block]})" for block, length in own.lengths]
    return found if len(own.axes) > 1 else [" * ".join(found)]

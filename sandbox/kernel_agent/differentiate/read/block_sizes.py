"""Sizes of blocks that a backward has in place of those that a launch passes, and the launch with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ...launches import Launch
from .block_uses import Uses


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks in place of those that a launch passes; programs along `axis` share out `rows`.
    `length`: an argument from which on rows have nothing to do, so that more of them may have programs."""

    sizes: dict[str, int]
    rows: str
    axis: int
    lines: range  # of the launch
    length: str | None = None

    def launch(self, launch: Launch) -> Launch:
        """The launch with these blocks; itself where its rows are not a multiple of theirs, nor may be."""
        own, theirs = self.sizes[self.rows], launch.args[self.rows]
        if not isinstance(theirs, int):
            return launch
        rows = launch.grid[self.axis] * theirs
        length = None if self.length is None else launch.args[self.length]
        if isinstance(length, int) and length <= rows and own % theirs == 0:
            rows = -(-rows // own) * own
        if rows % own:
            return launch
        grid = list(launch.grid)
        grid[self.axis] = rows // own
        return replace(launch, args={**launch.args, **self.sizes}, grid=tuple(grid))


@dataclass(frozen=True)
class Tiles(Blocks):
    """A smaller size for the one block of a launch: programs along `axis`, where there was one, share out its
    lanes, of which the argument `length` says how many there are."""

    def launch(self, launch: Launch) -> Launch:
        """The launch with these tiles; itself where the block's size is no number."""
        theirs = launch.args[self.rows]
        if not isinstance(theirs, int):
            return launch
        own = min(self.sizes[self.rows], theirs)
        most = launch.args.get(self.length) if self.length is not None else None
        used = min(most, theirs) if isinstance(most, int) else theirs
        grid = [*launch.grid, *[1] * (self.axis + 1 - len(launch.grid))]
        grid[self.axis] = max(-(-used // own), 1)
        return replace(launch, args={**launch.args, self.rows: own}, grid=tuple(grid))


@dataclass(frozen=True)
class Grid(Blocks):
    """Sizes for all the blocks of a launch whose programs have a tile of an output each: along `axes`, or all
    along one. `lengths` has, for the block of each of its axes, the argument that says how long that is.
    `uses`: names that the launch does not pass."""

    lengths: tuple[tuple[str, str], ...] = ()
    axes: tuple[int, ...] = ()
    uses: Uses = field(default_factory=Uses)

    def counts(self, args: dict[str, Any], sizes: dict[str, Any]) -> list[int]:
        """Programs along each of `axes`."""
        counts = [-(-args[length] // sizes[block]) for block, length in self.lengths]
        return counts if len(self.axes) > 1 else [math.prod(counts)]

    def named(self, launch: Launch) -> Launch:
        """The launch as if it passed its blocks by all their names."""
        more = {name: launch.args[block] for name, block in self.uses.of.items()}
        return replace(launch, args=launch.args | more, constexprs=(*launch.constexprs, *more))

    def serves(self, launch: Launch) -> bool:
        """Whether a launch is one of just these tiles."""
        args = self.named(launch).args
        if not all(isinstance(args[name], int) for pair in self.lengths for name in pair):
            return False
        return [launch.grid[axis] for axis in self.axes] == self.counts(args, args)

    def launch(self, launch: Launch) -> Launch:
        """The launch with these blocks; with its own where it is not one of just these tiles."""
        if not self.serves(launch):
            return self.named(launch)
        launch, grid = self.named(launch), list(launch.grid)
        for axis, count in zip(self.axes, self.counts(launch.args, self.sizes), strict=True):
            grid[axis] = count
        return replace(launch, args={**launch.args, **self.sizes}, grid=tuple(grid))


@dataclass(frozen=True)
class Queued(Blocks):
    """Sizes for the blocks of a launch whose programs walk a queue of tiles, however many those are."""

    def launch(self, launch: Launch) -> Launch:
        """The launch with these blocks."""
        return replace(launch, args={**launch.args, **self.sizes})

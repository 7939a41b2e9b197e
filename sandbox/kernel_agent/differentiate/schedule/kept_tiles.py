"""Tiles of an adjoint that the main kernel keeps: as a matrix, where owner kernels have tiles of their own.

    spill + program * (BLOCK_M * BLOCK_N) + lanes        only a kernel with the same tiles knows what is where
    spill + row * N + column                             any does

Rows and columns are those of the forward's output, masked to lie inside of it. A lane beyond it has no
upstream, and so no adjoint: it is loaded as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.nodes import Node
from ..read.block_sizes import Grid


@dataclass(frozen=True)
class Matrix:
    """Where the tile of a program is in a matrix: its numbers along rows and columns, how long those are."""

    numbers: tuple[Node, Node]
    lengths: tuple[Node, Node]

    def index(
        self, g: Graph, shape: tuple, variable: Callable[[Node], Node] = lambda number: number
    ) -> tuple[Node, Node]:
        """The rows and columns of a tile of some blocks; `variable` tells a program's number."""
        row, column = (
            g.add(g.mul(variable(number), size), g.lane(size, 0, 1))
            for number, size in zip(self.numbers, shape, strict=True)
        )
        return row, column

    def place(
        self, g: Graph, shape: tuple, variable: Callable[[Node], Node] = lambda number: number
    ) -> tuple[Node, Node]:
        """Where elements of a tile are, and which of them are inside."""
        rows, columns = self.lengths
        row, column = (g.along(one, axis, 2) for axis, one in enumerate(self.index(g, shape, variable)))
        inside = g.both(g.compare("<", row, rows), g.compare("<", column, columns))
        return g.add(g.mul(g.cast(row, "int64"), columns), column), inside


def matrix(
    own: Grid | None, numbered: list[tuple[Node, Node]], value: Node, known: list[Node]
) -> Matrix | None:
    """How a value of a launch with tiles of its own lies in a matrix, if it is one of a whole tile.
    `numbered`: the numbers of a program with their counts; `known`: nodes of the forward."""
    blocks = [n.attrs["name"] for n in value.shape if n.op == "constexpr"]
    if own is None or len(value.shape) != 2 or len(own.lengths) != 2:
        return None
    lengths = dict(own.lengths)
    numbers = {_block(own, count): number for number, count in numbered}
    params = {n.attrs["name"]: n for n in known if n.op == "param"}
    if set(blocks) != set(lengths) or set(numbers) != set(lengths) or len(numbered) != len(lengths):
        return None
    if not set(lengths.values()) <= set(params):
        return None
    row, column = blocks
    return Matrix((numbers[row], numbers[column]), (params[lengths[row]], params[lengths[column]]))


def _block(own: Grid, count: Node) -> str | None:
    """The block of the axis along which there are so many programs."""
    if count.op == "npid" and len(own.axes) > 1 and count.attrs["axis"] in own.axes:
        return own.lengths[own.axes.index(count.attrs["axis"])][0]
    if count.op == "cdiv" and count.args[1].op == "constexpr":
        return next((block for block, _ in own.lengths if block == count.args[1].attrs["name"]), None)
    return None

"""The uses of a block in a kernel under names of their own: one constexpr may stand for several axes.

    m, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

Read with other names for some uses, all of which have the block's value, a kernel is the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Where a name stands: the calls of helpers around it, and itself, by line and column.
Place = tuple[tuple[int, int], ...]
Use = tuple[str, Place]
MARK = "@"  # between a block and the number of one of its uses


@dataclass
class Uses:
    """`names`: of uses that have one; `of`: the block that each name stands for."""

    names: dict[Use, str] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)

    def name(self, block: str, place: Place) -> str:
        """What a block is called at a place."""
        return self.names.get((block, place), block)


class Each(Uses):
    """A name for each use of some blocks."""

    def __init__(self, blocks: set[str]) -> None:
        super().__init__()
        self.blocks = blocks

    def name(self, block: str, place: Place) -> str:
        block = block.partition(MARK)[0]  # what a helper is given has a name
        if block not in self.blocks:
            return block
        name = self.names.setdefault((block, place), f"{block}{MARK}{len(self.names)}")
        self.of[name] = block
        return name

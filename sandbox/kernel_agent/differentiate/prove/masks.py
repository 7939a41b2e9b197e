"""What a mask is made of: the conditions that all hold where it does."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir.nodes import Node

Bound = tuple[Node, Node, int]  # index along one axis, its bound, the axis


def parts(mask: Node | None) -> list[Node]:
    """The conditions that a mask is the conjunction of."""
    if mask is None:
        return []
    return [m for arg in mask.args for m in parts(arg)] if mask.op == "and" else [mask]


def conjuncts(mask: Node | None, rank: int) -> list[tuple[Node, tuple[int, ...]]]:
    """The conditions of a mask of a block with `rank` axes, also of parts that were expanded together, from
    left to right, each with the axes of the block that its own axes are."""
    found: list[tuple[Node, tuple[int, ...]]] = []
    stack = [(mask, tuple(range(rank - len(mask.shape), rank)))] if mask is not None else []
    while stack:
        node, axes = stack.pop()
        if node.op in ("and", "broadcast"):
            stack += [(a, axes[len(axes) - len(a.shape) :]) for a in node.args[::-1]]
        elif node.op == "expand":
            at = node.attrs["axis"]
            stack.append((node.args[0], (*axes[:at], *axes[at + 1 :])))
        else:
            found.append((node, axes))
    return found


def comparisons(mask: Node | None, rank: int) -> Iterator[tuple[Node, tuple[int, ...]]]:
    """The comparisons among them, the last first."""
    return (found for found in reversed(conjuncts(mask, rank)) if found[0].op == "compare")


def without_expansions(node: Node, axes: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
    """What was expanded, and which axes of a block its own are."""
    while node.op == "expand":
        at = node.attrs["axis"]
        axes, node = (*axes[:at], *axes[at + 1 :]), node.args[0]
    return node, axes


def upper_bounds(mask: Node, rank: int) -> frozenset[Bound]:
    """The conditions `index < bound` among them, each along one axis."""
    found: set[Bound] = set()
    for node, axes in comparisons(mask, rank):
        if node.attrs["cmp"] != "<" or node.args[1].shape:
            continue
        core, axes = without_expansions(node.args[0], axes)
        if len(core.shape) == 1:
            found.add((core, node.args[1], axes[-1]))
    return frozenset(found)

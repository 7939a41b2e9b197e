"""Writes to a lane's neighbour: the values change places, and the write goes to the lanes as they are.

    other = lanes + (lanes + 1) % 2 * 2 - 1        1, 0, 3, 2, ...: lanes ^ 1

An interleaved rotary embedding reads each pair in both orders, so that its gradient is written twice. With
the values of the second write swapped, both have one address, and are one write.
"""

from __future__ import annotations

import numpy as np

from ..ir.folding import COMPARE
from ..ir.graph import Graph
from ..ir.nodes import GradWrite, Node, nodes_in, walk
from ..ir.rewriter import Rewriter
from ..reverse.sweep import Reverse

LANES = 1 << 20  # the most that a block of Triton has
_COMPUTED = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "xor": np.bitwise_xor, "and": np.bitwise_and,
    "or": np.bitwise_or, "floordiv": np.floor_divide, "mod": np.mod, "shr": np.right_shift,
}  # fmt: skip


def run(reverse: Reverse) -> None:
    """Turn the writes to neighbours whose masks let both lanes of a pair through, or neither."""
    for write in (effect for effect in walk(reverse.effects) if isinstance(effect, GradWrite)):
        _turn(reverse.kernel.graph, write)


def _turn(g: Graph, write: GradWrite) -> None:
    if not write.offset.shape or write.value.shape != write.offset.shape:
        return
    known: dict[Node, np.ndarray | None] = {}
    found = [n for n in nodes_in([write.offset]) if n.op != "arange" and _swaps(known, n)]
    if not found:
        return
    lanes = next(n for n in nodes_in([found[0]]) if n.op == "arange")
    offset = Rewriter(g, lambda n: lanes if n in found else None).node(write.offset)
    moved = [*_lanes(known, write.offset), *([] if write.mask is None else _lanes(known, write.mask))]
    last = _last(write.offset, found)
    if not last or any(n not in found and not _pairs(known, n, lanes) for n in moved):
        return
    with g.at(write.region):
        write.value, write.offset = _swapped(g, write.value), offset


def _lanes(known: dict, root: Node) -> list[Node]:
    """The largest parts of a value that are made of lanes and numbers alone."""
    found: list[Node] = []
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if _values(known, node) is not None and any(n.op == "arange" for n in nodes_in([node])):
            found.append(node)
        else:
            stack += node.args
    return found


def _values(known: dict, node: Node) -> np.ndarray | None:
    """The numbers in a block of as many lanes as there may be; None where they hang on anything else."""
    if node not in known:
        known[node] = _computed(known, node)
    return known[node]


def _computed(known: dict, node: Node) -> np.ndarray | None:
    if node.op == "const" and isinstance(node.value, int):
        return np.full(1, int(node.value))
    if node.op == "full":
        return _values(known, node.args[0])
    if node.op == "arange":
        return np.arange(LANES) if node.args[0].op == "const" and node.args[0].value == 0 else None
    if node.op == "cast" and not node.is_float and not node.args[0].is_float or node.op == "broadcast":
        return _values(known, node.args[0]) if len(node.shape) < 2 else None
    compared = node.op == "compare" and not node.args[0].is_float
    if len(node.shape) > 1 or node.is_float or not (compared or node.op in _COMPUTED):
        return None
    args = [found for arg in node.args if (found := _values(known, arg)) is not None]
    aranges = {n for n in nodes_in([node]) if n.op == "arange"}
    if len(args) < len(node.args) or len(aranges) > 1:
        return None
    if node.op in ("floordiv", "mod") and bool(np.any(args[0] < 0) or np.any(args[1] < 1)):
        return None
    return COMPARE[node.attrs["cmp"]](*args) if compared else _COMPUTED[node.op](*args)


def _swaps(known: dict, node: Node) -> bool:
    values = _values(known, node) if len(node.shape) == 1 else None
    return values is not None and values.size == LANES and bool((values == np.arange(LANES) ^ 1).all())


def _pairs(known: dict, node: Node, lanes: Node) -> bool:
    """Whether a value is the same in both lanes of a pair, or is of other lanes."""
    if lanes not in nodes_in([node]):
        return True
    values = _values(known, node)
    return values is not None and values.size == LANES and bool((values[::2] == values[1::2]).all())


def _last(offset: Node, found: list[Node]) -> bool:
    """Whether some lanes are those of the last axis of a block, wherever they occur in it."""
    stack = [(offset, tuple(range(len(offset.shape))))]
    while stack:
        node, axes = stack.pop()
        if node in found:
            if axes != (len(offset.shape) - 1,):
                return False
        elif node.op == "expand":
            at = node.attrs["axis"]
            stack.append((node.args[0], (*axes[:at], *axes[at + 1 :])))
        elif any(n in found for n in nodes_in([node])):
            if node.op not in ("add", "sub", "mul", "broadcast", "cast"):
                return False
            stack += [(arg, axes[len(axes) - len(arg.shape) :]) for arg in node.args]
    return True


def _swapped(g: Graph, value: Node) -> Node:
    """A block with the elements of each pair along its last axis swapped."""
    *before, last = value.shape
    two = g.const(2)
    shape = (*before, g.make("floordiv", (last, two)), two)
    pairs = g.make("reshape", (value,), {}, value.dtype, shape)
    parts = [g.make("split", (pairs,), {"index": i}, value.dtype, shape[:-1]) for i in (1, 0)]
    joined = g.make("join", parts, {}, value.dtype, shape)
    return g.make("reshape", (joined,), {}, value.dtype, value.shape)

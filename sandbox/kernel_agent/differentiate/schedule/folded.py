"""One element of a row folded into the write of its block.

Cross-entropy's logits get a gradient for each block of a row, and one number more at the target. Two writes
to one gradient would be atomic, in float32, or a launch of their own for one element a row. But the block
that holds the column has it in registers:

    tl.store(d_row + cols, d + tl.where(cols == target, d_target, 0.0), mask=cols < N)

The blocks have all columns from 0 to N. That the index is one of them is nothing that the forward says, and
asking the host would wait for the GPU: where it is not, the row's gradient is NaN, and not silently wrong.
"""

from __future__ import annotations

from ..ir.names import adjoint_name
from ..ir.nodes import For, GradWrite, Node, bodies, nodes_in, placed, walk
from ..ir.simplify import is_zero
from ..prove.masks import parts
from ..reverse.sweep import Reverse

NAN = float("nan")


def run(reverse: Reverse) -> None:
    """Fold single elements into the writes of blocks, where both are of one row."""
    found = list(placed(reverse.effects, GradWrite))
    for base in dict.fromkeys(w.base for w, _ in found if w.base.op == "param"):
        mine = [(w, loops) for w, loops in found if w.base is base]
        blocks = [(w, loops) for w, loops in mine if w.offset.shape]
        singles = [w for w, _ in mine if not w.offset.shape]
        if len(blocks) == len(singles) == 1 and base.attrs["name"] not in reverse.kernel.inplace:
            _fold(reverse, *blocks[0], singles[0])


def _fold(reverse: Reverse, block: GradWrite, loops: tuple[For, ...], single: GradWrite) -> None:
    g = reverse.kernel.graph
    places = _places(block.offset, single.offset)
    if places is None or single.mask is not None or not loops or loops[-1].region.parent is not single.region:
        return
    column, index = places
    length = _length(loops[-1], block, column)
    if length is None or any(n.op in ("loopout", "phi", "ifout") for n in nodes_in([single.value, index])):
        return
    with g.at(block.region):
        hit = g.where(g.compare("==", column, index), single.value, g.number(0))
        inside = g.both(g.compare(">=", index, g.const(0)), g.compare("<", index, length))
        block.value = g.where(inside, g.add(block.value, hit), g.number(NAN))
    for effects in (reverse.effects, *(body for e in walk(reverse.effects) for body in bodies(e))):
        if single in effects:
            effects.remove(single)
    name = adjoint_name(block.base.attrs["name"])
    told = f"{name}: added where its block is stored; a row with an index outside of it becomes NaN"
    reverse.say(single.line, "fold", "one row", told)


def _places(block: Node, single: Node) -> tuple[Node, Node] | None:
    """Column and index, of two offsets that have all else in common."""
    if block.op != "add" or single.op != "add":
        return None
    for row in block.args:
        if row in single.args and not row.shape:
            (column,) = [a for a in block.args if a is not row] or [row]
            (index,) = [a for a in single.args if a is not row] or [row]
            return (column, index) if len(column.shape) == 1 and not index.shape else None
    return None


def _length(loop: For, block: GradWrite, column: Node) -> Node | None:
    """N, where the loop's blocks have each column from 0 to N once, and the write has no other condition."""
    region = loop.region
    if loop.cond is not None or region.bounds is None or region.iv is None or block.mask is None:
        return None
    low, high, step = region.bounds
    lanes = [n for n in column.args if n is not region.iv] if column.op == "add" else []
    if len(lanes) != 1 or lanes[0].op != "arange" or region.iv not in column.args:
        return None
    first, last = lanes[0].args
    whole = is_zero(low) and is_zero(first) and last is step
    conditions = parts(block.mask)
    bounded = len(conditions) == 1 and conditions[0].op == "compare" and conditions[0].attrs["cmp"] == "<"
    if not whole or not bounded or conditions[0].args != (column, high):
        return None
    return high

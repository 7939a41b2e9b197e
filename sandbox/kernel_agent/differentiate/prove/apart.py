"""Two writes at a fixed distance from each other, the halves of a row say, that reach no element both.

Both together are one write with an axis more, along which the distance is the stride: what proves that one
disjoint keeps the two apart, and each of them disjoint.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.nodes import For, Node, Region
from .affine import Affine, Monomial, nonzero
from .disjoint import Proof, disjoint, monomial_node
from .masks import parts


def apart(
    g: Graph,
    one: tuple[Node, Node | None],
    two: tuple[Node, Node | None],
    loops: tuple[For, ...],
    axes: list[int],
    grid: tuple[int, ...],
    region: Region | None = None,
) -> Proof | str:
    """A proof that two accesses, each an offset and a mask, reach disjoint elements, each once, in all
    programs and all steps of `loops`; or why there is none. `region`: where both stand."""
    affine = Affine(g)
    distance = _distance(affine, one[0], two[0])
    if distance is None:
        return "several places write this gradient"
    first, (factor, ids) = distance
    offset = one[0] if first else two[0]
    rank = len(offset.shape)
    mask: Node | None = None
    for condition in parts(one[1]):
        if condition in parts(two[1]):
            kept = g.expand(condition, len(condition.shape)) if condition.shape else condition
            mask = g.both(mask, kept)
    found: Proof | str = ""
    # Between the two there may be more of the kind: thirds of a row are two apart.
    for step, count in dict.fromkeys([(factor, 2), *((1, factor + k) for k in (1, 2, 3))]):
        wide = g.expand(offset, rank) if rank else offset
        lane = g.lane(g.const(count), rank, rank + 1)
        wide = g.add(wide, g.mul(lane, monomial_node(affine, g, (step, ids))))
        found = disjoint(g, wide, mask, loops, axes, None, grid, region)
        if isinstance(found, Proof):
            break
    return found


def _distance(affine: Affine, one: Node, two: Node) -> tuple[bool, Monomial] | None:
    """How far the farther of two offsets is from the other, and whether the first is the nearer one."""
    if one.shape != two.shape:
        return None
    axes = tuple(range(len(one.shape)))
    left, right = affine.terms(one, axes), affine.terms(two, axes)
    difference = {
        variables: {
            ids: right.get(variables, {}).get(ids, 0) - left.get(variables, {}).get(ids, 0)
            for ids in {**left.get(variables, {}), **right.get(variables, {})}
        }
        for variables in {**left, **right}
    }
    form = nonzero(difference)
    if set(form) != {()} or len(form[()]) != 1:
        return None
    ((ids, factor),) = form[()].items()
    return factor > 0, (abs(factor), ids)

"""Two writes to one gradient of which a program makes both: the later one adds to what it has itself stored.

A group norm reads a row twice: for its sums, and channel by channel for what it stores. Both gradients are of
one program's own row. The loop that is walked first stores, and the other adds after a barrier, without
atomics. No element is of two programs where program ids are the highest digits of both addresses, the same
ones, and the rest of each is less than a step of them.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.names import adjoint_name
from ..ir.nodes import For, GradWrite, Node, placed
from ..ir.nonnegative import natural
from ..ir.simplify import is_number
from ..ir.spelling import on_host
from ..prove.affine import Affine, nonzero
from ..prove.disjoint import Layout, Proof, disjoint, overlaps
from ..reverse.sweep import Reverse
from .gradient_writes import depends, store


def run(reverse: Reverse, axes: list[int], grid: tuple[int, ...]) -> None:
    """Make a store and an addition of the two atomic adds to a gradient, where that is proven."""
    found = list(placed(reverse.effects, GradWrite))
    for base in dict.fromkeys(w.base for w, _ in found):
        mine = [(w, loops) for w, loops in found if w.base is base]
        plain = base.op == "param" and base.attrs["name"] not in reverse.kernel.inplace
        if not plain or len(mine) != 2 or any(w.kind != "atomic_add" or not loops for w, loops in mine):
            continue
        (one, first), (two, second) = mine
        if any(region.cond is not None for w in (one, two) for region in w.region.chain()):
            continue
        outs = set(first[0].outs.values())
        if first[0] is second[0] or not depends(two.value, outs):  # which of them stands first
            continue
        proofs = [_proven(reverse.kernel.graph, w, loops, axes, grid) for w, loops in mine]
        (proof, ids), (other, same) = proofs
        if proof is None or other is None or ids != same:
            continue
        store(one, proof)
        store(two, other)
        two.kind, second[0].waits = "add", True
        owned = f"one program owns each element of {adjoint_name(base.attrs['name'])}"
        reverse.say(one.line, "store", proof.text, owned)
        reverse.say(two.line, "store", other.text, f"{owned}, and adds to what it has stored")


def _proven(
    g: Graph, write: GradWrite, loops: tuple[For, ...], axes: list[int], grid: tuple[int, ...]
) -> tuple[Proof | None, dict[int, int]]:
    """A proof that a write is disjoint, and between which addresses a program's own are; the strides of the
    programs."""
    proof = disjoint(g, write.offset, write.mask, loops, axes, None, grid, write.region)
    affine = Affine(g)
    form = nonzero(affine.terms(write.offset, tuple(range(len(write.offset.shape)))))
    if not isinstance(proof, Proof) or proof.asked or len(proof.layouts) != 1 or () in form:
        return None, {}
    ids: dict[int, int] = {}
    for variables, coefficients in form.items():
        if any(var.kind in ("floordiv", "mod", "opaque") for var in variables):
            return None, {}
        if variables[0].kind == "pid":
            ((factors, factor),) = coefficients.items() if len(coefficients) == 1 else (((), 0),)
            if len(variables) > 1 or factor != 1 or len(factors) != 1:
                return None, {}
            ids[variables[0].key[0]] = factors[0]
    if set(ids) != set(axes):
        return None, {}
    strides = {affine.nodes[i]: axis for axis, i in ids.items()}
    (layout,) = proof.layouts
    own = [(stride, extent) for stride, extent in layout if stride not in strides]
    outer = [(stride, g.npid(strides[stride])) for stride, _ in layout if stride in strides]
    if len(outer) != len(ids) or any(extent is None or not natural(stride) for stride, extent in own):
        return None, {}
    reach: Node = g.one
    for stride, extent in own:
        assert extent is not None
        reach = g.add(
            reach, g.mul(stride, g.sub(extent, g.one)) if not is_number(stride, 1) else g.sub(extent, g.one)
        )
    whole: Layout = [*outer, (g.one, reach)]
    if not all(on_host(n) for pair in whole for n in pair if n is not None) or overlaps(g, whole, grid):
        return None, {}
    proof.layouts.append(whole)
    return proof, ids

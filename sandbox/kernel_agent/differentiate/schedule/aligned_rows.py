"""Rows that a launch reads for its products of matrices, and whether they are whole multiples of 16 elements.

    x_ptr + m[:, None] * K + k[None, :]            K % 16 == 0

Triton compiles a kernel anew for whole numbers that are multiples of 16. It then loads 16 bytes at once, and
copies them to shared memory while earlier ones are multiplied; of other rows each element is loaded by
itself, and a large tile has too many of them. Of elements of four bytes it has half as many, each of which
may be copied by itself: a large tile takes two thirds of the time of a small one all the same
(bench/results/exact-products-h200.json).

A backward reads what the products of the forward read, and upstream gradients where that stores. Operands
that are computed once (`operands`) have rows that are aligned: then only what its own products load is asked
for.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir.nodes import BYTES, Node, Store, nodes_in, real, walk
from ..prove.affine import Affine, nonzero
from ..read.trace import Site

ALIGNED = 16  # the multiple that Triton asks whole numbers for

Factors = tuple[int, ...]  # ids of what is multiplied


def strides(site: Site, blocks: Collection[str], backward: list | None = None) -> list[Node]:
    """What has to be a multiple for all rows to be; `blocks`: constexprs that are sizes of tiles. `backward`:
    the effects of its kernels, where those do not read all that."""
    g, effects = site.kernel.graph, site.kernel.effects if backward is None else backward
    read = [arg for n in nodes_in(effects) if n.op == "dot" for arg in n.args[:2]]
    offsets = [n.args[1] for n in nodes_in(read) if n.op == "load" and _is_half(n.args[0])]
    for store in walk(effects):
        if not isinstance(store, Store) or not _is_half(store.base):
            continue
        if any(n.op == "dot" for n in nodes_in([store.value])):
            offsets.append(store.offset)
    affine = Affine(g)
    found = {factors for offset in offsets for factors in _strides(affine, offset, blocks)}
    least = [one for one in found if not any({*other} < {*one} for other in found)]
    return [g.product(affine.nodes[i] for i in ids) for ids in sorted(least)]


def _is_half(pointer: Node) -> bool:
    """Whether elements have fewer than four bytes, in the traced call."""
    return BYTES.get(real(pointer.attrs.get("elem", "")), 2) < 4


def _strides(affine: Affine, offset: Node, blocks: Collection[str]) -> set[Factors]:
    """What an offset's indices are multiplied with, but for neighbours', if that is no multiple by itself."""
    g, form = affine.g, nonzero(affine.terms(offset, tuple(range(len(offset.shape)))))

    def number(factor: int, ids: Factors) -> int:
        for i in ids:
            factor *= int(g.concrete(affine.nodes[i]) or 0)
        return factor

    beside = [
        index
        for index, terms in form.items()
        if len(index) == 1
        and index[0].kind == "lane"
        and sum(number(f, ids) for ids, f in terms.items()) == 1
    ]
    found: set[Factors] = set()
    for index in form.keys() - {(), *beside} if beside else ():
        for ids, factor in form[index].items():
            known = tuple(i for i in ids if affine.nodes[i].attrs.get("name") in blocks)
            if number(factor, known) % ALIGNED:
                found.add(tuple(i for i in ids if i not in known))
    return found - {()}

"""Gradient writes: those to one address are merged, proven ones are stores, what stores reach is counted."""

from __future__ import annotations

from ..ir.address_tables import root
from ..ir.names import adjoint_name
from ..ir.nodes import For, GradWrite, Node, bodies, placed, reachable, walk
from ..ir.values import is_static
from ..prove.affine import Affine
from ..prove.cover import reached
from ..prove.disjoint import Proof, disjoint
from ..reverse.sweep import Reverse, children, writes


def merge(reverse: Reverse) -> None:
    """Sum the writes that go to the same address under the same mask, at the place of the last of them."""
    inner = [body for effect in walk(reverse.effects) for body in bodies(effect)]
    for effects in (reverse.effects, *inner):
        _merge_list(reverse, effects)


def _merge_list(reverse: Reverse, effects: list) -> None:
    """Within one list, and across its loops over one range as far as a write needs no carry of its loop."""
    g = reverse.kernel.graph
    last: dict[tuple, tuple[GradWrite, list, For | None]] = {}
    places: list[tuple[GradWrite, list, For | None]] = [
        (e, effects, None) for e in effects if isinstance(e, GradWrite)
    ]
    for loop in effects:
        if isinstance(loop, For) and loop.cond is None:
            places += [(e, loop.effects, loop) for e in loop.effects if isinstance(e, GradWrite)]
    for write, where, loop in places:
        key = (write.base, write.offset, write.mask, loop.region if loop else None)
        if key in last:
            earlier, source, home = last[key]
            if home is not loop and home is not None and depends(earlier.value, _carried(home)):
                continue
            g.here = write.region
            write.value = g.add(earlier.value, write.value)
            source.remove(earlier)
        last[key] = (write, where, loop)
    g.here = g.top


def _carried(loop: For) -> set[Node]:
    """What has a value only inside a loop: its own carries, and those of the forward loop that it undoes."""
    both = [loop, loop.source] if loop.source is not None else [loop]
    return {carry.phi for one in both for carry in one.carries}


def depends(node: Node, wanted: set[Node]) -> bool:
    """Whether a value needs one of `wanted`, also through loops."""
    return any(item in wanted for item in reachable([node], children))


def prove(reverse: Reverse, axes: list[int], grid: tuple[int, ...]) -> None:
    """Decide store or atomic add for every write, and say why."""
    found = list(placed(reverse.effects, GradWrite))
    for write, loops in found:
        name = write.base.attrs["name"]
        others = [w for w, _ in found if root(w.base) is root(write.base) and w is not write]
        entry = write.base.args[1] if write.base.op == "entry" else None
        if all(_apart(write, other) for other in others):
            proof = disjoint(reverse.kernel.graph, write.offset, write.mask, loops, axes, entry, grid)
        else:
            proof = "several places write this gradient"
        if isinstance(proof, Proof):
            store(write, proof)
            owned = f"one program owns each element of {adjoint_name(name)}"
            reverse.say(write.line, "store", proof.text, owned)
        else:
            write.proof = proof
            reverse.say(write.line, "atomic", "none", f"gradient of {name}: {proof}")


def store(write: GradWrite, proof: Proof) -> None:
    """Make a plain store of a write that is proven disjoint."""
    write.kind, write.proof, write.layouts = "store", proof.text, proof.layouts


def _apart(a: GradWrite, b: GradWrite) -> bool:
    """Two branches of one condition: at the same address, or of one that all programs decide alike."""
    return a.region.excludes(b.region, is_static) or a.offset is b.offset and a.region.excludes(b.region)


def mark(reverse: Reverse) -> None:
    """Count what the stores of the main kernel reach."""
    g = reverse.kernel.graph
    for write in writes(reverse.effects):
        loops = all(region.kind in ("top", "for") for region in write.region.chain())
        affine = Affine(g)
        groups = affine.solved(write.offset)
        if write.kind == "store" and loops and groups is not None:
            write.covers = reached(affine, g, groups, write.offset, write.mask)

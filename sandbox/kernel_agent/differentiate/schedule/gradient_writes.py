"""Gradient writes: those to one address are merged, proven ones are stores, what stores reach is counted, and
what a branch skips is filled with zeros."""

from __future__ import annotations

from ..ir.address_tables import root
from ..ir.graph import Graph
from ..ir.names import adjoint_name
from ..ir.nodes import For, GradWrite, If, Node, Region, Store, bodies, nodes_in, placed, reachable, walk
from ..ir.transplant import Graft
from ..ir.values import is_static
from ..prove import stored_rows
from ..prove.affine import Affine
from ..prove.apart import apart
from ..prove.cover import reached
from ..prove.disjoint import Proof, disjoint
from ..prove.masks import parts
from ..reverse.sweep import Reverse, children, writes

SKIPPED = "the other branch"


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


def prove(reverse: Reverse, axes: list[int], grid: tuple[int, ...], stored: bool = False) -> None:
    """Decide store or atomic add for every write, and say why. `stored`: take rows to be disjoint that
    outputs' stores keep apart."""
    found = list(placed(reverse.effects, GradWrite))
    g = reverse.kernel.graph
    replaced = {(s.base, s.offset, s.mask) for s in walk(reverse.kernel.effects) if isinstance(s, Store)}
    for write, loops in found:
        name = write.base.attrs["name"]
        others = [p for p in found if root(p[0].base) is root(write.base) and p[0] is not write]
        entry = write.base.args[1] if write.base.op == "entry" else None
        pairs = [
            _pair(g, write, other, (*loops, *more), axes, grid)
            for other, more in others
            if not _apart(write, other)
        ]
        proof = next((found for found in pairs if isinstance(found, str)), None) or disjoint(
            g, write.offset, write.mask, loops, axes, entry, grid, write.region
        )
        by_rows = None
        if stored and isinstance(proof, str) and not others and entry is None:
            by_rows = stored_rows.disjoint(reverse.kernel, write.offset, write.mask, loops, axes, grid)
        if by_rows is not None:
            proof = by_rows[0]
        if isinstance(proof, Proof):
            for pair in pairs:
                assert isinstance(pair, Proof)
                proof.layouts += pair.layouts
                proof.asked += pair.asked
            store(write, proof)
            if name in reverse.kernel.inplace and (write.base, write.offset, write.mask) not in replaced:
                write.kind = "add"  # what is only read there keeps its upstream
            owned = f"one program owns each element of {adjoint_name(name)}"
            owned += stored_rows.said(None if by_rows is None else by_rows[1])
            reverse.say(write.line, "store", proof.text, owned)
        else:
            write.proof = proof
            reverse.say(write.line, "atomic", "none", f"gradient of {name}: {proof}")


def store(write: GradWrite, proof: Proof) -> None:
    """Make a plain store of a write that is proven disjoint."""
    write.kind, write.proof = "store", proof.text
    write.layouts, write.asked = proof.layouts, proof.asked


def _pair(
    g: Graph, a: GradWrite, b: GradWrite, loops: tuple[For, ...], axes: list[int], grid: tuple[int, ...]
) -> Proof | str:
    """A proof that two writes to one gradient meet nowhere."""
    if a.base is not b.base or a.base.op == "entry":
        return "several places write this gradient"
    region = a.region if a.region is b.region else None
    return apart(g, (a.offset, a.mask), (b.offset, b.mask), loops, axes, grid, region)


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


def fill(reverse: Reverse) -> None:
    """Where a branch skips the only store of a gradient, zeros are stored in the other one: that is less than
    zeros everywhere beforehand."""
    g = reverse.kernel.graph
    every = writes(reverse.effects)
    for stmt in [e for e in reverse.effects if isinstance(e, If) and not e.static]:
        then, other = (stmt.then, stmt.then_effects), (stmt.other, stmt.other_effects)
        (taken, stores), (skipped, zeros) = (then, other) if stmt.then_effects else (other, then)
        for write in writes(stores) if not zeros else []:
            loops = list(write.region.chain())[:-2]
            alone = write.kind == "store" and sum(w.base is write.base for w in every) == 1
            if not alone or any(region.kind != "for" for region in loops) or not _plain(write):
                continue
            affine = Affine(g)
            groups = affine.solved(write.offset)
            write.covers = None if groups is None else reached(affine, g, groups, write.offset, write.mask)
            if write.covers is not None:
                zeros.append(_zeros(g, {taken: skipped}, write, loops))
                name = adjoint_name(write.base.attrs["name"])
                reverse.say(write.line, "store", SKIPPED, f"{name}: zeros where the branch is not taken")


def _plain(write: GradWrite) -> bool:
    """Whether an address is made of ids, lanes and sizes alone."""
    made = {"load", "loopout", "ifout", "phi", "reduce", "scan", "combine", "fold", "dot", "random", "call"}
    return all(n.op not in made for n in nodes_in([write.offset, *parts(write.mask)]))


def _zeros(g: Graph, branch: dict[Region, Region], write: GradWrite, loops: list[Region]) -> object:
    """The same store of zeros, and the loops around it, in the other branch."""
    graft = Graft(g, {}, g.top)
    graft.regions.update(branch)
    mask = None if write.mask is None else graft.node(write.mask)
    offset, inside = graft.node(write.offset), graft.region(write.region)
    zeros = g.zeros(offset.shape, write.value.dtype)
    effect: object = GradWrite(
        write.base, offset, mask, zeros, inside, write.line, "store", SKIPPED, write.layouts, write.asked
    )
    for region in loops:
        assert region.parent is not None
        effect = For(graft.region(region), graft.region(region.parent), effects=[effect])
    return effect

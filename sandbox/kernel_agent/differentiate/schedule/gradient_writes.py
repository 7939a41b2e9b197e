"""Gradient writes: merge those to one address, turn atomic adds into stores where a proof allows it, count
what stores reach."""

from __future__ import annotations

from ..ir.address_tables import root
from ..ir.names import adjoint_name
from ..ir.nodes import For, GradWrite, If, Node, placed, reachable, walk
from ..ir.report import LineReport
from ..prove.affine import Affine
from ..prove.cover import reached
from ..prove.disjoint import Proof, disjoint
from ..reverse.sweep import Reverse, children, writes


def merge(reverse: Reverse) -> None:
    """Sum the writes that go to the same address under the same mask, at the place of the last of them."""
    _merge_list(reverse, reverse.effects)
    for effect in list(walk(reverse.effects)):
        if isinstance(effect, For):
            _merge_list(reverse, effect.effects)
        elif isinstance(effect, If):
            _merge_list(reverse, effect.then_effects)
            _merge_list(reverse, effect.other_effects)


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
    return any(isinstance(item, Node) and item in wanted for item in reachable([node], children))


def prove(reverse: Reverse, axes: list[int]) -> None:
    """Decide store or atomic add for every write, and say why."""
    placed = placed_writes(reverse.effects)
    for write, loops in placed:
        others = [w for w, _ in placed if root(w.base) is root(write.base) and w is not write]
        if any(not _apart(write, other) for other in others):
            reason = "several places write this gradient"
        else:
            entry = write.base.args[1] if write.base.op == "entry" else None
            proof = disjoint(reverse.kernel.graph, write.offset, write.mask, loops, axes, entry)
            if isinstance(proof, Proof):
                write.kind, write.proof, write.layouts = "store", proof.text, proof.layouts
                name = write.base.attrs["name"]
                reverse.report.append(
                    LineReport(
                        write.line,
                        "store",
                        proof.text,
                        f"one program owns each element of {adjoint_name(name)}",
                    )
                )
                continue
            reason = proof
        write.proof = reason
        name = write.base.attrs["name"]
        reverse.report.append(LineReport(write.line, "atomic", "none", f"gradient of {name}: {reason}"))


def placed_writes(effects: list) -> list[tuple[GradWrite, tuple[For, ...]]]:
    """Every gradient write, with the loops around it."""
    return list(placed(effects, GradWrite))


def _apart(a: GradWrite, b: GradWrite) -> bool:
    """Same address in two branches of one condition."""
    return a.offset is b.offset and a.region.excludes(b.region)


def mark(reverse: Reverse) -> None:
    """Count what the stores of the main kernel reach."""
    g = reverse.kernel.graph
    for write in writes(reverse.effects):
        loops = all(region.kind in ("top", "for") for region in write.region.chain())
        affine = Affine(g)
        groups = affine.solved(write.offset)
        if write.kind == "store" and loops and groups is not None:
            write.covers = reached(affine, g, groups, write.offset, write.mask)

"""Several writes to one gradient: the proven one is stored first, a launch of its own adds the others.

Cross-entropy's logits get a block from every program and one more element at the target. The block alone
could be stored; that nobody else writes to it meanwhile is guaranteed by the order of two launches. What is
left is one atomic add a row, not one an element. A late write that is proven disjoint itself, as that of a
row's neighbour is, needs no atomic add either: nothing else is written in its launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..ir.names import adjoint_name, stem
from ..ir.nodes import For, GradWrite, If, Node, nodes_in, placed, reachable, sides
from ..ir.report import Why
from ..prove.disjoint import Proof, disjoint
from ..reverse.sweep import Reverse, writes
from .gradient_writes import store


def split(reverse: Reverse, axes: list[int], refused: dict[Node, str], grid: tuple[int, ...]) -> list:
    """Take the late writes out of the main kernel; returns the effects of the second launch."""
    found = list(placed(reverse.effects, GradWrite))
    late: list[GradWrite] = []
    for base in dict.fromkeys(w.base for w, _ in found):
        mine = [(w, loops) for w, loops in found if w.base is base]
        if len(mine) < 2 or any(w.kind != "atomic_add" for w, _ in mine):
            continue
        graph = reverse.kernel.graph
        proofs = {
            w: disjoint(graph, w.offset, w.mask, loops, axes, None, grid, w.region) for w, loops in mine
        }
        first = _first(reverse, proofs)
        if first is None:
            continue
        others = [w for w in proofs if w is not first]
        store(first, proofs[first])  # type: ignore[arg-type]
        late += others
        owned = f"one program owns each element of {adjoint_name(base.attrs['name'])}"
        reason = f"{owned}; what other lines add to it follows in a second launch"
        reverse.say(first.line, "store", first.proof, reason)
        refused[base] = _why(others)
        alone = proofs[others[0]]
        plain = base.op == "param" and base.attrs["name"] not in reverse.kernel.inplace
        if len(others) == 1 and isinstance(alone, Proof) and plain:
            store(others[0], alone)
            others[0].kind = "add"
            reverse.say(others[0].line, "store", alone.text, f"{owned} in the second launch, too")
    if not late:
        return []
    effects = picked(reverse.effects, lambda write: write if write in late else None)
    reverse.effects = _without(reverse.effects, late)
    return effects


def _first(reverse: Reverse, proofs: dict[GradWrite, Proof | str]) -> GradWrite | None:
    """The largest write that is proven disjoint and leaves cheap ones only."""
    able = [
        write
        for write, proof in proofs.items()
        if isinstance(proof, Proof)
        and all(is_straight(w.offset, w.mask, w.value) for w in proofs if w is not write)
    ]
    return max(able, key=lambda w: reverse.kernel.graph.elements(w.offset.shape), default=None)


def is_straight(*values: Node | None) -> bool:
    """Whether values need no loop, no tape and no result of a branch that writes: they are cheap to compute
    once more, and the same then."""
    nodes = [n for n in reachable([n for n in values if n is not None], _parts) if isinstance(n, Node)]
    return not any(n.op in ("loopout", "phi") or n.attrs.get("buffer") or _writes(n) for n in nodes)


def _parts(node: Node) -> list[Node]:
    return [*node.args, *sides(node)] if node.op == "ifout" else list(node.args)


def _writes(node: Node) -> bool:
    stmt = node.attrs["if"] if node.op == "ifout" else None
    return stmt is not None and bool(writes(stmt.then_effects + stmt.other_effects))


def _why(others: list[GradWrite]) -> Why:
    for write in others:
        for load in (n for n in nodes_in([write.offset]) if n.op == "load"):
            where = f"`{load.hint or stem(load.args[0].attrs['name'])}` of line {load.line}"
            return Why("fold", f"that {where} stays in the program's own tile is not known")
    return Why("several", "several places write this gradient")


def picked(effects: list, made: Callable[[GradWrite], GradWrite | None]) -> list:
    """Effects anew with what is made of the writes alone; None: nothing is."""
    kept: list = []
    for effect in effects:
        if isinstance(effect, GradWrite):
            write = made(effect)
            kept += [] if write is None else [write]
        elif isinstance(effect, For):
            inner = picked(effect.effects, made)
            if inner:
                kept.append(For(effect.region, effect.outer, effects=inner, order="any", line=effect.line))
        elif isinstance(effect, If):
            then, other = picked(effect.then_effects, made), picked(effect.other_effects, made)
            if then or other:
                kept.append(replace(effect, then_effects=then, other_effects=other, outs=[]))
    return kept


def _without(effects: list, late: list[GradWrite]) -> list:
    """The effects without the late writes."""
    for effect in effects:
        if isinstance(effect, For):
            effect.effects = _without(effect.effects, late)
        elif isinstance(effect, If):
            effect.then_effects = _without(effect.then_effects, late)
            effect.other_effects = _without(effect.other_effects, late)
    return [effect for effect in effects if effect not in late]

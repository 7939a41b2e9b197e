"""Several writes to one gradient: the proven one is stored first, a launch of its own adds the others.

Cross-entropy's logits get a block from every program and one more element at the target. The block alone
could be stored; that nobody else writes to it meanwhile is guaranteed by the order of two launches. What is
left is one atomic add a row, not one an element.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.names import adjoint_name, stem
from ..ir.nodes import For, GradWrite, If, Node, nodes_in, placed
from ..ir.report import Why
from ..prove.disjoint import Proof, disjoint
from ..reverse.sweep import Reverse
from .gradient_writes import store


def split(reverse: Reverse, axes: list[int], refused: dict[Node, str]) -> list:
    """Take the late writes out of the main kernel; returns the effects of the second launch."""
    found = list(placed(reverse.effects, GradWrite))
    late: list[GradWrite] = []
    for base in dict.fromkeys(w.base for w, _ in found):
        mine = [(w, loops) for w, loops in found if w.base is base]
        if len(mine) < 2 or any(w.kind != "atomic_add" for w, _ in mine):
            continue
        proofs = [(w, disjoint(reverse.kernel.graph, w.offset, w.mask, loops, axes)) for w, loops in mine]
        proven = [(w, proof) for w, proof in proofs if isinstance(proof, Proof)]
        if not proven:
            continue
        first, proof = max(proven, key=lambda found: reverse.kernel.graph.elements(found[0].offset.shape))
        others = [w for w, _ in mine if w is not first]
        if not all(map(_straight, others)):
            continue
        store(first, proof)
        late += others
        owned = f"one program owns each element of {adjoint_name(base.attrs['name'])}"
        reason = f"{owned}; what other lines add to it follows in a second launch"
        reverse.say(first.line, "store", proof.text, reason)
        refused[base] = _why(others)
    if not late:
        return []
    effects = _only(reverse.effects, late, True)
    reverse.effects = _only(reverse.effects, late, False)
    return effects


def _straight(write: GradWrite) -> bool:
    """Whether a write needs no loop, no tape and no result of a branch: it is cheap to compute once more."""
    roots = [n for n in (write.offset, write.mask, write.value) if n is not None]
    return not any(n.op in ("loopout", "ifout", "phi") or n.attrs.get("buffer") for n in nodes_in(roots))


def _why(others: list[GradWrite]) -> Why:
    for write in others:
        for load in (n for n in nodes_in([write.offset]) if n.op == "load"):
            where = f"`{load.hint or stem(load.args[0].attrs['name'])}` of line {load.line}"
            return Why("fold", f"that {where} stays in the program's own tile is not known")
    return Why("several", "several places write this gradient")


def _only(effects: list, late: list[GradWrite], wanted: bool) -> list:
    """The effects with only the late writes, or without them."""
    kept: list = []
    for effect in effects:
        if isinstance(effect, GradWrite):
            if (effect in late) == wanted:
                kept.append(effect)
        elif isinstance(effect, For):
            inner = _only(effect.effects, late, wanted)
            if wanted and inner:
                kept.append(For(effect.region, effect.outer, effects=inner, order="any", line=effect.line))
            elif not wanted:
                effect.effects = inner
                kept.append(effect)
        elif isinstance(effect, If):
            then, other = _only(effect.then_effects, late, wanted), _only(effect.other_effects, late, wanted)
            if not wanted:
                effect.then_effects, effect.other_effects = then, other
                kept.append(effect)
            elif then or other:
                kept.append(replace(effect, then_effects=then, other_effects=other, outs=[]))
        elif not wanted:
            kept.append(effect)
    return kept

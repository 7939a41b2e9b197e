"""What the conditions around a place say about one that stands there: `STAGE == 2` has no answer but no where
`STAGE & 1` holds, and all conditions on STAGE have one where it equals a number.
"""

from __future__ import annotations

from typing import Any

from ..ir.graph import Graph
from ..ir.nodes import Node, nodes_in
from ..ir.values import is_static

LINEAR = {"add", "sub", "neg", "const", "constexpr"}


def settled(g: Graph, cond: Node) -> bool | None:
    """The answer to a condition that is known when the kernel is compiled, where the conditions around leave
    only one."""
    around = [(r.cond, r.positive) for r in g.here.chain() if r.cond is not None and is_static(r.cond)]
    for known, answer in around:
        if known is cond:
            return answer
        equal = _equal(g, known) if answer else None
        found = None if equal is None else _answer(g, cond, *equal)
        if found is not None:
            return found
    wanted = _equal(g, cond)
    if wanted is None:
        return None
    answers = [(_answer(g, known, *wanted), answer) for known, answer in around]
    return False if any(found is not None and found is not answer for found, answer in answers) else None


def _equal(g: Graph, cond: Node) -> tuple[Node, Any] | None:
    """The one constexpr that a condition is about, and the value that it must have: `4 - STAGE == 1`."""
    if cond.op != "compare" or cond.attrs["cmp"] != "==":
        return None
    names = [n for n in nodes_in([cond]) if n.op == "constexpr"]
    if len(names) != 1:
        return None
    (name,) = names
    for side, other in (cond.args, cond.args[::-1]):
        if side is name and other.op == "const":
            return name, other.value
    if any(n.op not in LINEAR for side in cond.args for n in nodes_in([side])):
        return None
    at = [_difference(g, cond, name, k) for k in (0, 1)]
    if not all(isinstance(value, int) for value in at) or at[0] == at[1] or at[0] % (at[0] - at[1]):
        return None
    return name, at[0] // (at[0] - at[1])


def _difference(g: Graph, cond: Node, name: Node, value: int) -> Any:
    left, right = (g.concrete(side, {name.id: value}) for side in cond.args)
    return None if left is None or right is None else left - right


def _answer(g: Graph, cond: Node, name: Node, value: Any) -> bool | None:
    """The answer to a condition that is about one constexpr alone, where that has a value."""
    about = [n for n in nodes_in([cond]) if n.op not in ("const", "compare", "not") and not n.args]
    if about != [name]:
        return None
    found = g.concrete(cond, {name.id: value})
    return None if found is None else bool(found)

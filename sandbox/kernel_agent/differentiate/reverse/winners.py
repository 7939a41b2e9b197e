"""The last of many: a value that a loop chooses, beside the number of the step that it is from.

    wins = value > best
    best = tl.where(wins, value, best)
    winner = tl.where(wins, i * k + j, winner)

What the loop leaves is the value of one step, and the number that it leaves says of which, where steps have
numbers of their own and none has the first one. So the adjoint goes to that step alone, without what the loop
carried: no tape, and steps in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.nodes import Carry, For, Node, Store, beneath, nodes_in, walk
from ..ir.nonnegative import natural
from ..ir.values import Kernel, loop_out


@dataclass(frozen=True)
class Won:
    """Of `where(wins, value, best)`: the number that the loop leaves, and the step's."""

    last: Node
    number: Node


@dataclass
class _Nest:
    """A loop and those around it, innermost first, with the places of a value and a number among carries."""

    loops: list[For]
    values: list[int]
    numbers: list[int]


def find(kernel: Kernel) -> dict[Node, Won]:
    """The choices of a kernel whose adjoints go to one step each."""
    found: dict[Node, Won] = {}
    loops = list(_loops(kernel))
    known = list(nodes_in(kernel.effects))
    for loop in loops:
        chosen = {k: node for k, carry in enumerate(loop.carries) if (node := _choice(carry)) is not None}
        for k, value in chosen.items():
            if not loop.carries[k].phi.active:
                continue
            for n, number in chosen.items():
                if number.args[0] is not value.args[0] or loop.carries[n].phi.is_float:
                    continue
                nest = _around(loop, loops, k, n)
                if _is_alone(kernel, known, nest) and _tells_apart(nest, number.args[1]):
                    last = loop_out(kernel.graph, nest.loops[-1], nest.numbers[-1])
                    found[value] = Won(last, number.args[1])
    return found


def _choice(carry: Carry) -> Node | None:
    """What takes something else or leaves a carry as it is, if that is what a step does with it."""
    node = carry.next
    return node if node is not None and node.op == "where" and node.args[2] is carry.phi else None


def _loops(kernel: Kernel) -> Iterator[For]:
    seen = {n.attrs["loop"] for n in nodes_in(kernel.effects) if n.op == "loopout"}
    seen |= {e for e in walk(kernel.effects) if isinstance(e, For)}
    return iter(sorted(seen, key=lambda loop: loop.region.depth))


def _around(loop: For, loops: list[For], value: int, number: int) -> _Nest:
    """The loops that carry the same two through an inner one."""
    nest = _Nest([loop], [value], [number])
    while True:
        inner = nest.loops[-1]
        outs = [inner.outs.get(nest.values[-1]), inner.outs.get(nest.numbers[-1])]
        begun = [inner.carries[nest.values[-1]].init, inner.carries[nest.numbers[-1]].init]
        for outer in loops:
            at = [next((i for i, c in enumerate(outer.carries) if c.phi is phi), None) for phi in begun]
            if None not in at and all(outer.carries[i].next is out for i, out in zip(at, outs, strict=True)):  # type: ignore[index]
                nest.loops.append(outer)
                nest.values.append(at[0])  # type: ignore[arg-type]
                nest.numbers.append(at[1])  # type: ignore[arg-type]
                break
        else:
            return nest


def _is_alone(kernel: Kernel, known: list[Node], nest: _Nest) -> bool:
    """Whether nothing else is made of the value within the loops, and nothing of what it began with."""
    carries = [loop.carries[k] for loop, k in zip(nest.loops, nest.values, strict=True)]
    inside = {carry.phi for carry in carries} | {carry.next for carry in carries}
    inside -= {None}
    users = [n for n in known if n.active and not inside.isdisjoint(n.args) and n is not carries[0].next]
    stored = [e for e in walk(kernel.effects) if isinstance(e, Store) and beneath(e.value, "cast") in inside]
    inits = [c for loop in _loops(kernel) for c in loop.carries if c.init in inside and c not in carries]
    return not users and not stored and not inits and not carries[-1].init.active


def _tells_apart(nest: _Nest, number: Node) -> bool:
    """Whether each step of the loops has a number of its own, and none what the number began with."""
    first = beneath(nest.loops[-1].carries[nest.numbers[-1]].init, "full", "broadcast", "cast")
    if first.op != "const" or not first.value < 0 or not natural(number):
        return False
    for loop in nest.loops:
        bounds = loop.region.bounds
        if bounds is None or loop.region.kind != "for":
            return False
        low, _, step = bounds
        if any(n.op != "const" for n in (low, step)) or (low.value, step.value) != (0, 1):
            return False
    number = beneath(number, "broadcast", "cast")
    inner = nest.loops[0].region
    if len(nest.loops) == 1:
        return number is inner.iv
    if len(nest.loops) > 2 or number.op != "add":
        return False
    outer = nest.loops[1].region
    count = inner.bounds[1]  # type: ignore[index]
    for tens, ones in (number.args, number.args[::-1]):
        whole = tens.op == "mul" and (tens.args in ((outer.iv, count), (count, outer.iv)))
        if ones is inner.iv and whole:
            return True
    return False

"""Values that are infinite far out where what a kernel makes of them is a number all the same.

    y = x / (1 + exp(-x))          exp(-x) is infinite below -88, and y is 0
    y = tanh(log(1 + exp(x)))      1
    y = log(1 + exp(log(s) - x))   0 where the exponentials that s sums are all 0, and log(s) -infinite

The adjoint that comes back is 0 there, and times an infinite value it would be no number. But what has
overflowed does not change with its argument any more, nor does a sum of exponentials that are all 0: the
kernel computes a constant there. Where that is right its derivative is 0, which the rules give for the nodes
found here: 0 where the adjoint is exactly 0, and nowhere else. Where an output is infinite the gradient
stays no number, also where functions that grow slowly, as log does, hide it (`is_closed`). log(0) of what is
no such sum is one point and no constant: its derivative may be 1 there, and stays no number.

A value counts where exp (and the like) of something without a bound leads to it and on to a function that
makes a number of it, lane by lane; not through sums over lanes or through loops. Where only a maximum, a
minimum or a choice drops the infinite value, and it has no other use, the rules drop its adjoint by the same
condition (`rules.chosen`). Which values are found decides on text and on NaN alone: 0 is right for any value
that is infinite where its adjoint is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..ir.graph import Graph
from ..ir.kinds import MOVING, words
from ..ir.nodes import Node, beneath, nodes_in, operands, reachable
from ..ir.ranges import ALL, Ranges
from ..ir.simplify import is_zero
from ..ir.values import Kernel

LARGE = 80.0  # exp of less is finite in every type but float16, which no GPU takes exp in
SQUASHED = 0  # beside the signs of infinity: made a number of
POWERS = {"exp": 1.0, "exp2": math.log(2), "exp10": math.log(10)}  # what is exp(factor * x)
GROWS = POWERS | {"expm1": 1.0, "cosh": 1.0, "sinh": 1.0}
SLOW = words("log log2 log10 log1p sqrt cbrt asinh acosh pow")
LOGARITHMS = ("log", "log2", "log10")
BOTH = (1, -1)
State = tuple[Node, int]  # a value, and the sign of its infinity
# What functions make of infinity, and of minus infinity.
ENDS: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys((*POWERS, "expm1"), (1, SQUASHED)),
    **dict.fromkeys(words("sigmoid tanh erf erfc atan normcdf rcbrt"), (SQUASHED, SQUASHED)),
    **dict.fromkeys(("rsqrt", "erfcx"), (SQUASHED, None)),
    **dict.fromkeys(words("log log2 log10 log1p sqrt acosh"), (1, None)),
    **dict.fromkeys(("cbrt", "asinh", "sinh"), (1, -1)),
    **dict.fromkeys(("abs", "cosh"), (1, 1)),
}


def find(kernel: Kernel) -> set[Node]:
    """The values that may be infinite where an output is not."""
    search = _Search(kernel)
    found: set[Node] = set()
    for node in list(search.users):
        for sign in search.starts(node):
            found |= search.squashed_from(node, sign)
    return found


def sums_powers(node: Node) -> bool:
    """Whether a value sums exponentials, so that it is 0 only where each is 0, or left out."""
    stack, any_power = [node], False
    while stack:
        one = stack.pop()
        if one.op == "call" and one.attrs["fn"] in POWERS:
            any_power = True
        elif one.op == "add":
            stack += one.args
        elif one.op == "where":
            stack += one.args[1:]
        elif one.op in MOVING or one.op == "cast" or (one.op == "reduce" and one.attrs["fn"] == "sum"):
            stack.append(one.args[0])
        elif not is_zero(one):
            return False
    return any_power


def settled(g: Graph, d: Node, contribution: Node) -> Node:
    """A contribution that is 0 where the adjoint is."""
    sign = g.neg if contribution.op == "neg" else lambda one: one
    dead = g.compare("==", beneath(d, "neg"), g.number(0))
    return sign(g.where(dead, g.number(0), beneath(contribution, "neg")))


def sources(node: Node) -> set[Node]:
    """What is loaded, summed or carried that a value is made of, lane by lane."""
    ends = ("load", "reduce", "loopout", "phi", "ifout")
    found = reachable([node], lambda one: () if one.op in ends else one.args)
    return {one for one in found if one.op in ends}


class _Search:
    def __init__(self, kernel: Kernel) -> None:
        self.ranges = Ranges()
        self.users: dict[Node, list[Node]] = {}
        for node in nodes_in(kernel.effects):
            self.users.setdefault(node, [])
            for part in operands(node):
                if isinstance(part, Node):
                    self.users.setdefault(part, []).append(node)
        effects = (item for item in reachable(kernel.effects) if not isinstance(item, Node))
        self.kept = {part for item in effects for part in operands(item) if isinstance(part, Node)}

    def starts(self, node: Node) -> Iterator[int]:
        """The infinities that begin at a value."""
        if node.op != "call" or not node.active:
            return
        name = node.attrs["fn"]
        if name in GROWS:
            low, high = self.ranges.of(node.args[0])
            if high * GROWS[name] > LARGE:
                yield 1
            if low * GROWS[name] < -LARGE and name in ("cosh", "sinh"):
                yield 1 if name == "cosh" else -1
        elif name in LOGARITHMS and sums_powers(node.args[0]) and self.ranges.of(node.args[0])[0] <= 0:
            yield -1

    def squashed_from(self, start: Node, sign: int) -> set[Node]:
        """What lies between a value and functions that make numbers of its infinity."""
        before: dict[State, list[State]] = {(start, sign): []}
        ends: list[State] = []
        stack: list[State] = [(start, sign)]
        while stack:
            state = stack.pop()
            for user in self.users[state[0]]:
                for made in self.step(user, *state, start) or ():
                    after = (user, made)
                    if made == SQUASHED:
                        ends.append(state)
                    elif after in before:
                        before[after].append(state)
                    elif not is_slow(user) or self.is_closed(user, made, start):
                        before[after] = [state]
                        stack.append(after)
        found: set[State] = set()
        while ends:
            state = ends.pop()
            if state not in found:
                found.add(state)
                ends += before[state]
        return {node for node, _ in found}

    def is_closed(self, node: Node, sign: int, start: Node) -> bool:
        """Whether nothing else than numbers is made of an infinity: no output is infinite by it."""
        seen: set[State] = {(node, sign)}
        stack = list(seen)
        while stack:
            state = stack.pop()
            if state[0] in self.kept:
                return False
            for user in self.users[state[0]]:
                made = self.step(user, *state, start)
                if made is None:
                    return False
                more = {(user, one) for one in made if one != SQUASHED} - seen
                seen |= more
                stack += more
        return True

    def step(self, user: Node, node: Node, sign: int, start: Node) -> tuple[int, ...] | None:
        """What an operation makes of an infinite argument: signs, or SQUASHED; nothing where it drops it, or
        has no derivative; None where it is not followed."""
        op, args = user.op, user.args
        if not user.is_float or (op == "where" and node not in args[1:]):
            return ()
        if op in MOVING or op in ("cast", "ifout"):
            return (sign,)
        if op in ("neg", "add", "sub"):
            return (-sign,) if op == "neg" or (op == "sub" and args[1] is node) else (sign,)
        if op == "mul":
            other = args[1] if args[0] is node else args[0]
            return (1,) if other is node else self.signs(other, sign)
        if op == "div":
            return (SQUASHED,) if args[1] is node else self.signs(args[1], sign)
        if op in ("maximum", "minimum") and sign == (1 if op == "maximum" else -1):
            return (sign,)
        if op in ("maximum", "minimum", "clamp"):
            return () if self.is_chain(start, node) else (SQUASHED,)
        if op == "where":
            if not self.is_chain(start, node):
                decides = not sources(args[0]).isdisjoint(sources(start))
                return (sign, SQUASHED) if decides else (sign,)
            return () if bounds(self.ranges, user, node, start) else (sign,)
        if op == "call" and user.attrs["fn"] == "pow":
            return self.power(user, node, sign)
        ends = ENDS.get(user.attrs["fn"]) if op == "call" else None
        made = ends and ends[sign < 0]
        return None if made is None else (made,)

    def is_chain(self, start: Node, node: Node) -> bool:
        """Whether one value is made of another, that of nothing else, and so on."""
        while start is not node and len(self.users[start]) == 1:
            (start,) = self.users[start]
        return start is node

    def signs(self, factor: Node, sign: int) -> tuple[int, ...]:
        low, high = self.ranges.of(factor)
        return (sign,) if low >= 0 else (-sign,) if high <= 0 else BOTH

    def power(self, user: Node, node: Node, sign: int) -> tuple[int, ...] | None:
        base, exponent = user.args
        if base is not node or exponent is node:
            return None
        low, high = self.ranges.of(exponent)
        return (SQUASHED,) * (low < 0) + ((1,) if sign > 0 else BOTH) * (high > 0)


def is_slow(node: Node) -> bool:
    """Whether a function's derivative is 0 where its value is infinite, which hides that it is."""
    return node.op == "call" and node.attrs["fn"] in SLOW


def bounds(ranges: Ranges, choice: Node, node: Node, start: Node) -> bool:
    """Whether a choice takes a value only where what the power at its start is of is small, as where
    softplus is x above 20."""
    cond, first, second = choice.args
    if start.op != "call" or start.attrs["fn"] not in POWERS or cond.op != "compare" or first is second:
        return False
    x, limit = (beneath(arg, "cast", "broadcast", "full") for arg in cond.args)
    cmp = cond.attrs["cmp"]
    above = cmp in (">", ">=") and node is second  # taken where x is at most the limit
    below = cmp in ("<", "<=") and node is first
    if not (above or below) or limit.op != "const" or not isinstance(limit.value, (int, float)):
        return False
    of, factor = beneath(start.args[0], "cast", "broadcast"), POWERS[start.attrs["fn"]]
    if of.op == "mul" and of is not x:
        other = [arg for arg in of.args if beneath(arg, "cast", "broadcast") is not x]
        low, high = ranges.of(other[0]) if len(other) == 1 else ALL
        if not 0 <= low == high < math.inf:
            return False
        of, factor = x, factor * low
    return of is x and limit.value * factor <= LARGE

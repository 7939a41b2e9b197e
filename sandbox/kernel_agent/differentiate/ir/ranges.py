"""Between which numbers a value lies, as far as that follows from how it is made.

Infinite ends are those that are not known. What is no number is left out of account: a bound says nothing of
it. `exp(x - max(x))` is at most 1, and a sum of those over the axis of the maximum at least 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .kinds import MOVING
from .nodes import Node, beneath, sides

Range = tuple[float, float]
ALL: Range = (-math.inf, math.inf)
SPREAD = ("expand", "broadcast", "full", "cast")
_WITHIN: dict[str, Range] = {
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "sinpi", "cospi"), (-1.0, 1.0)),
    **dict.fromkeys(("sigmoid", "normcdf"), (0.0, 1.0)),
    "erfc": (0.0, 2.0),
    **dict.fromkeys(("sqrt", "rsqrt", "cosh"), (0.0, math.inf)),
    "atan": (-math.pi / 2, math.pi / 2),
}
# Functions that grow with their argument, and what they are of numbers.
_GROWING: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "exp10": lambda x: 10.0**x,
    "expm1": math.expm1,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "log1p": math.log1p,
}
_ENDS = {"exp": 0.0, "exp2": 0.0, "exp10": 0.0, "expm1": -1.0}  # far below


def at_most_one(node: Node) -> bool:
    """Whether the magnitude of every element is 1 at most, up to rounding."""
    if node.op == "ifout":
        return all(map(at_most_one, sides(node)))
    low, high = Ranges().of(node)
    return low >= -1 and high <= 1


class Ranges:
    """Remembers what it finds."""

    def __init__(self) -> None:
        self.known: dict[Node, Range] = {}

    def of(self, node: Node) -> Range:
        """Arguments first, as chains of additions are long."""
        stack = [node]
        while stack:
            one = stack[-1]
            rest = [arg for arg in one.args if arg not in self.known and arg.is_float | (arg.op == "const")]
            if one in self.known or not rest:
                stack.pop()
                self.known.setdefault(one, self._of(one))
            else:
                stack += rest
        return self.known[node]

    def _of(self, node: Node) -> Range:
        if node.op == "const":
            number = isinstance(node.value, (int, float)) and not math.isnan(node.value)
            return (float(node.value), float(node.value)) if number else ALL
        ranges = [self.known.get(arg, ALL) for arg in node.args]
        if node.op in MOVING or (node.op == "cast" and node.is_float):
            return ranges[0]
        if node.op == "call":
            return _of_call(node.attrs["fn"], ranges)
        if node.op == "reduce":
            return self._of_reduced(node, ranges[0])
        rule = _RULES.get(node.op)
        if rule is None:
            return ALL
        if node.op == "where":
            ranges[1:] = [self._where(node, at, ranges[at]) for at in (1, 2)]
        low, high = rule(node, ranges)
        if node.op == "sub" and self.is_least(node.args[0], node.args[1]):
            high = min(high, 0.0)
        return low, high

    def _where(self, choice: Node, at: int, known: Range) -> Range:
        """The range of a value where it is chosen: what is asked of it, of what it negates, or of the two
        that it is the difference of, holds there."""
        cond, value = choice.args[0], choice.args[at]
        if cond.op != "compare":
            return known
        x, limit = (beneath(arg, *SPREAD) for arg in cond.args)
        cmp = cond.attrs["cmp"]
        if cmp not in ("<", "<=", ">", ">="):
            return known
        above = (cmp in (">", ">=")) is (at == 1)
        value = beneath(value, *SPREAD)
        bound = (0.0, 0.0)
        if value.op == "sub" and {x, limit} == {beneath(arg, *SPREAD) for arg in value.args}:
            negated = beneath(value.args[0], *SPREAD) is not x
        elif limit.op == "const" and (
            value is x or (value.op == "neg" and beneath(value.args[0], *SPREAD) is x)
        ):
            negated, bound = value is not x, self._of(limit)
        else:
            return known
        low, high = (bound[0], math.inf) if above else (-math.inf, bound[1])
        low, high = (-high, -low) if negated else (low, high)
        return max(low, known[0]), min(high, known[1])

    def _of_reduced(self, node: Node, inner: Range) -> Range:
        if node.attrs["fn"] != "sum":
            return inner if node.attrs["fn"] in ("max", "min") else ALL
        if inner[0] < 0:
            return ALL
        return (1.0 if _holds_its_largest(node) else 0.0), math.inf

    def is_least(self, one: Node, other: Node) -> bool:
        """Whether a value is at most another in every lane."""
        top = beneath(other, *SPREAD)
        if top is beneath(one, "broadcast", "cast") or top is one:
            return True
        if top.op == "maximum":
            return any(self.is_least(one, arg) for arg in top.args)
        if top.op == "add":  # a log-sum-exp is at least the maximum
            pairs = (top.args, top.args[::-1])
            return any(self.known.get(b, ALL)[0] >= 0 and self.is_least(one, a) for a, b in pairs)
        return top.op == "reduce" and top.attrs["fn"] == "max" and top.args[0] is one


def _holds_its_largest(total: Node) -> bool:
    """Whether a sum of exp(x - m) goes along the axis of which m is the maximum: one of them is 1."""
    power = total.args[0]
    if power.op != "call" or power.attrs["fn"] not in ("exp", "exp2", "exp10") or power.args[0].op != "sub":
        return False
    x, m = power.args[0].args
    spread = []
    while m.op in ("expand", "broadcast"):
        spread += [m.attrs["axis"]] if m.op == "expand" else []
        m = m.args[0]
    if m.op != "reduce" or m.attrs["fn"] != "max" or m.args[0] is not x:
        return False
    axis = total.attrs["axis"]
    return m.attrs["axis"] == axis and (not m.shape or spread == [axis])


def _of_call(name: str, ranges: list[Range]) -> Range:
    if name in _GROWING:
        return tuple(_at(name, end) for end in ranges[0])  # type: ignore[return-value]
    if name == "abs":
        low, high = ranges[0]
        return max(low, -high, 0.0), max(-low, high)
    return _WITHIN.get(name, ALL)


def _at(name: str, x: float) -> float:
    """A growing function of one end, infinite where it ends."""
    if x == -math.inf:
        return _ENDS.get(name, -math.inf)
    try:
        return x if x == math.inf else _GROWING[name](x)
    except (OverflowError, ValueError):
        return math.inf if name in _ENDS else -math.inf


def times(one: Range, other: Range) -> Range:
    ends = [0.0 if 0 in (a, b) else a * b for a in one for b in other]
    return min(ends), max(ends)


def _mul(node: Node, ranges: list[Range]) -> Range:
    low, high = times(*ranges)
    return (max(low, 0.0), high) if node.args[0] is node.args[1] else (low, high)


def _div(node: Node, ranges: list[Range]) -> Range:
    low, high = ranges[1]
    if low < 0 and high <= 0:
        return times((-ranges[0][1], -ranges[0][0]), _inverse(-high, -low))
    return times(ranges[0], _inverse(low, high)) if low >= 0 else ALL


def _inverse(low: float, high: float) -> Range:
    return 1 / high if high else math.inf, 1 / low if low else math.inf


_RULES: dict[str, Callable[[Node, list[Range]], Range]] = {
    "neg": lambda _, r: (-r[0][1], -r[0][0]),
    "add": lambda _, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "sub": lambda _, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "mul": _mul,
    "div": _div,
    "maximum": lambda _, r: (max(r[0][0], r[1][0]), max(r[0][1], r[1][1])),
    "minimum": lambda _, r: (min(r[0][0], r[1][0]), min(r[0][1], r[1][1])),
    "clamp": lambda _, r: (max(min(r[0][0], r[2][1]), r[1][0]), min(max(r[0][1], r[1][0]), r[2][1])),
    "where": lambda _, r: (min(r[1][0], r[2][0]), max(r[1][1], r[2][1])),
}

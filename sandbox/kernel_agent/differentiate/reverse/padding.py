"""Lanes that a mask switches off, where an adjoint is 0: what a forward reads there is its own `other`, of
which a derivative may be no number. `0 * NaN` is NaN, and a sum over lanes hands it on to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ..ir.kinds import LANEWISE, MOVING
from ..ir.nodes import Node

LARGE = 80.0  # exp of more is near the end of float32


def _positive(x: float) -> bool:
    return 0 < x < math.inf


# Where the functions that are not defined everywhere are defined, and have a derivative.
DEFINED: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), _positive),
    **dict.fromkeys(("cbrt", "rcbrt"), lambda x: x != 0),
    **dict.fromkeys(("exp", "exp2", "exp10", "expm1"), lambda x: x < LARGE),
    **dict.fromkeys(("sinh", "cosh", "tan"), lambda x: abs(x) < LARGE),
    **dict.fromkeys(("asin", "acos", "atanh", "erfinv"), lambda x: abs(x) < 1),
    "log1p": lambda x: x > -1,
    "acosh": lambda x: x > 1,
    "erfcinv": lambda x: 0 < x < 2,
    "normcdfinv": lambda x: 0 < x < 1,
    "erfcx": lambda x: x > -9,
    "pow": lambda x, _: x > 0,
    "atan2": lambda x, z: x != 0 or z != 0,
    **dict.fromkeys(("fmod", "remainder"), lambda _, z: z != 0),
}
TAME = ("exp", "exp2", "exp10", "expm1", "sinh", "cosh", "tan", "erfcx")  # undefined for odd values only
_VALUES: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "maximum": max,
    "minimum": min,
}
_CALLS = {name: getattr(math, name) for name in ("exp", "log", "sqrt", "sin", "cos", "tanh")} | {"abs": abs}


def dead_lanes_hurt(name: str, *args: Node) -> bool:
    """Whether the derivative of a function (or of "div") may be no number in lanes that are masked off."""
    lanes = _Lanes()
    values = [lanes.value(arg) for arg in args]
    if not lanes.any_mask(args):
        return False
    if name in ("div", "fmod", "remainder"):  # any dividend will do
        values[0] = 1.0
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return name not in TAME
    defined = DEFINED[name] if name != "div" else lambda _, divisor: divisor != 0
    return not all(map(math.isfinite, known)) or not defined(*known)


def value_hurts(node: Node) -> bool:
    """Whether a value may be no finite number there: itself, or what it is made of lane by lane."""
    lanes = _Lanes()
    value = lanes.value(node)
    if not lanes.any_mask([node]) or (value is not None and math.isfinite(value)):
        return False
    if value is not None:
        return True
    name = "div" if node.op == "div" else node.attrs.get("fn", "")
    if (name in DEFINED or name == "div") and node.args[-1].shape and dead_lanes_hurt(name, *node.args):
        return True
    return node.op in LANEWISE | MOVING and any(map(value_hurts, node.args))


class _Lanes:
    """What values are where all masks are off, None where that is not known, and the masks. A scalar
    argument, as an epsilon is, is taken for 1."""

    def __init__(self) -> None:
        self.seen: dict[Node, tuple[set[Node], float | None]] = {}

    def any_mask(self, nodes: Iterable[Node]) -> bool:
        return any(self.of(node)[0] for node in nodes)

    def value(self, node: Node) -> float | None:
        return self.of(node)[1]

    def of(self, node: Node) -> tuple[set[Node], float | None]:
        if node not in self.seen:
            self.seen[node] = self._of(node)
        return self.seen[node]

    def _of(self, node: Node) -> tuple[set[Node], float | None]:
        if node.op == "load":
            return ({node.args[2]}, self.value(node.args[3])) if node.attrs.get("other") else (set(), None)
        if node.op == "loopout" and node.shape:  # made of what the loop loads
            return {node}, None
        known = LANEWISE | MOVING | {"reduce", "const", "param", "constexpr"}
        if node.op not in known or (node.op == "reduce" and not node.shape):  # one number, and a live one
            return set(), None
        masks = set[Node]().union(*(self.of(arg)[0] for arg in node.args))
        return masks, self._value(node) if len(masks) < 2 else None

    def _value(self, node: Node) -> float | None:
        if node.op == "const":
            return float(node.value) if isinstance(node.value, (int, float)) else None
        if node.op in ("param", "constexpr"):
            return 1.0
        values = [self.value(arg) for arg in node.args]
        if node.op in MOVING or node.op == "cast":
            return values[0]
        if node.op == "reduce":
            return values[0] if values[0] == 0 or node.attrs["fn"] != "sum" else None
        operation = _CALLS.get(node.attrs["fn"]) if node.op == "call" else _VALUES.get(node.op)
        if operation is None or None in values:
            return None
        try:
            return operation(*values)
        except (ValueError, ZeroDivisionError, OverflowError):
            return math.nan

"""Whether a combine function merges means, by what it computes: it can be written in many ways.

Parts have a mean, a sum of squared distances from it and a count (Chan, Golub and LeVeque, 1979):

    n = n_a + n_b,   mean = (n_a mean_a + n_b mean_b) / n
    m2 = m2_a + m2_b + (mean_b - mean_a)^2 n_a n_b / n

Two rational functions that agree at points drawn at random are the same, but for a chance of nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

from ...source import words
from ..ir.nodes import Node

Roles = tuple[int, int, int]  # which of the values is the mean, the sum of squares and the count
# Counts of the two parts, for which the function has to be right.
_WHOLE = ((3.0, 5.0), (1.0, 1.0), (7.0, 2.0), (0.0, 4.0), (6.0, 0.0), (0.0, 1.0), (1.0, 0.0), (11.0, 8.0))
_ANY = ((0.3, 0.45), (0.02, 0.01), (0.0, 0.7), (0.6, 0.0), (1.3, 0.2), (0.4, 2.5), (5.7, 3.1), (0.0, 0.03))
_KEEPING = words(
    "add sub mul neg maximum minimum cast full broadcast expand permute reshape"
)  # whole numbers whole
_TWO: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "maximum": max, "minimum": min,
    "and": lambda a, b: a and b, "or": lambda a, b: a or b,
}  # fmt: skip
_COMPARED: dict[str, Callable] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Merge:
    roles: Roles
    of_any: bool  # counts may be any numbers, not whole ones alone: many guard against 0 by max(n, 1)


def merge_of_means(left: list[Node], right: list[Node], made: list[Node]) -> Merge | None:
    """The roles of a function's three values; None where it is no such merge."""
    if len(made) != 3:
        return None
    orders: list[Roles] = [(a, b, c) for a, b, c in itertools.permutations(range(3))]
    for roles in orders:
        if _merges(left, right, made, roles, _WHOLE):
            return Merge(roles, _merges(left, right, made, roles, _ANY))
    return None


def _merges(
    left: list[Node],
    right: list[Node],
    made: list[Node],
    roles: Roles,
    counts: tuple[tuple[float, float], ...],
) -> bool:
    drawn = random.Random(0)
    for n_a, n_b in counts:
        mean_a, mean_b = drawn.uniform(-2, 2), drawn.uniform(-2, 2)
        m2_a, m2_b = drawn.uniform(0, 3) * (n_a > 0), drawn.uniform(0, 3) * (n_b > 0)
        n = n_a + n_b
        wanted = (
            (n_a * mean_a + n_b * mean_b) / n,
            m2_a + m2_b + (mean_b - mean_a) ** 2 * n_a * n_b / n,
            float(n),
        )
        at: dict[Node, float] = {}
        for operands, values in ((left, (mean_a, m2_a, n_a)), (right, (mean_b, m2_b, n_b))):
            at |= {operands[role]: float(value) for role, value in zip(roles, values, strict=True)}
        try:
            found = [_value(made[role], at) for role in roles]
        except KeyError:
            return False
        if not all(
            math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(found, wanted, strict=True)
        ):
            return False
    return True


def is_whole(node: Node, taken: frozenset[Node] = frozenset()) -> bool:
    """Whether a value is a whole number in every lane; `taken` are those of a loop's last step that are."""
    if node in taken or not node.is_float:
        return True
    if node.op == "const":
        return float(node.attrs["value"]).is_integer()
    if node.op == "where":
        return all(is_whole(arg, taken) for arg in node.args[1:])
    if node.op == "loopout":
        carry = node.attrs["loop"].carries[node.attrs["index"]]
        return is_whole(carry.init, taken) and is_whole(carry.next, taken | {carry.phi})
    known = node.op in _KEEPING or (node.op == "reduce" and node.attrs["fn"] in ("sum", "max", "min"))
    return known and all(is_whole(arg, taken) for arg in node.args)


def _value(node: Node, at: dict[Node, float]) -> float:
    """What an operation gives for these operands of a function; KeyError for one that is no arithmetic."""
    if node in at:
        return at[node]
    if node.op == "const":
        return node.attrs["value"]
    args = [_value(arg, at) for arg in node.args]
    if node.op in ("full", "broadcast", "expand", "cast"):
        made = args[0]
    elif node.op == "neg":
        made = -args[0]
    elif node.op == "not":
        made = not args[0]
    elif node.op == "div":
        made = args[0] / args[1] if args[1] else math.nan
    elif node.op == "where":
        made = args[1] if args[0] else args[2]
    elif node.op == "compare":
        made = _COMPARED[node.attrs["cmp"]](*args)
    else:
        made = _TWO[node.op](*args)
    at[node] = made
    return made

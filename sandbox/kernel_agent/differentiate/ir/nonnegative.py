"""Which integers are never negative: only those can be digits of an index.

Sizes, strides and steps are taken to be positive, unless the traced call passes a negative one. A number
that is loaded may be anything, and `//` and `%` are C's: the remainder of a negative number is negative.
"""

from __future__ import annotations

from .kinds import NATURAL
from .nodes import Node, sides


def natural(node: Node) -> bool:
    """Whether a value is zero or more in every program, iteration and lane."""
    if node.op in ("const", "constexpr"):
        return isinstance(node.value, (bool, int)) and node.value >= 0
    if node.op == "param":
        return (node.attrs.get("traced") or 0) >= 0
    if node.op in ("pid", "vpid", "npid"):
        return True
    if node.op in ("load", "cast") and node.dtype.startswith("uint"):
        return True
    if node.op == "cast":
        return not node.args[0].is_float and natural(node.args[0])
    if node.op == "arange":
        return natural(node.args[0])
    if node.op == "iv":
        return node.home.bounds is not None and natural(node.home.bounds[0])
    if node.op == "maximum":
        return any(map(natural, node.args))
    if node.op == "where":
        return all(map(natural, node.args[1:]))
    if node.op == "ifout":
        return all(map(natural, sides(node)))
    return node.op in NATURAL and bool(node.args) and all(map(natural, node.args))

"""Constant folding: what an operation on numbers gives, as Triton's compiler or the host computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .nodes import Node, is_float


def concrete(node: Node, memo: dict[int, Any]) -> Any:
    if node.id in memo:
        return memo[node.id]
    value: Any = None
    if node.op in ("const", "constexpr"):
        value = node.value
    elif node.op == "param":
        value = node.attrs.get("traced")
    elif node.op == "isnone":
        value = bool(node.attrs["none"])
    elif node.op in FOLD:
        args = [concrete(arg, memo) for arg in node.args]
        if all(arg is not None for arg in args) and not node.shape:
            value = fold(node.op, args, node.attrs)
    memo[node.id] = value
    return value


def _cdiv_floor(a: Any, b: Any) -> Any:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


FOLD: dict[str, Callable[..., Any] | None] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "pow": lambda a, b: a**b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: _cdiv_floor(a, b) if isinstance(a, int) and isinstance(b, int) else a // b,
    "mod": lambda a, b: a - _cdiv_floor(a, b) * b,
    "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda a: 1 << (a - 1).bit_length() if a > 0 else 0,
    "minimum": min,
    "maximum": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "land": lambda a, b: a and b,
    "lor": lambda a, b: a or b,
    "not": lambda a: not a,
    "select": lambda cond, a, b: a if cond else b,
    "neg": lambda a: -a,
    "invert": lambda a: (not a) if isinstance(a, bool) else ~a,
    "compare": None,
    "cast": None,
}


def fold(op: str, args: list, attrs: dict) -> Any:
    try:
        if op == "compare":
            return COMPARE[attrs["cmp"]](*args)
        if op == "cast":
            return float(args[0]) if is_float(attrs["to"]) else int(args[0])
        operation = FOLD[op]
        return None if operation is None else operation(*args)
    except (TypeError, ZeroDivisionError, OverflowError):
        return None

"""How operations, numbers and conditions are spelled in generated source."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from ...source import words
from .nodes import Node

INFIX = {
    "add": ("+", 9), "sub": ("-", 9), "mul": ("*", 10), "div": ("/", 10), "floordiv": ("//", 10), "mod": ("%", 10),
    "fmod": ("%", 10), "and": ("&", 7), "or": ("|", 5), "xor": ("^", 6), "shl": ("<<", 8), "shr": (">>", 8), "land": ("and", 2), "lor": ("or", 1),
    "pow": ("**", 12),
}  # fmt: skip
ATOM = 20
TRIVIAL = {"const", "constexpr", "param", "iv", "phi", "full", "isnone"}
_CALLS = {"minimum": "min", "maximum": "max", "abs": "abs"}
_CALLS |= {name: f"triton.{name}" for name in ("cdiv", "next_power_of_2")}
# The host's `%` has another sign than a float remainder.
_SPELLED = words("const param constexpr npid cast neg invert compare not isnone") | set(INFIX) - {"fmod"}


def on_host(node: Node) -> bool:
    """Whether the host can compute a value that is the same everywhere from the arguments of a launch."""
    if node.op in ("select", "where", "ifout"):
        return all(part is None or on_host(part) for part in choice(node))
    return (node.op in _SPELLED or call_name(node) is not None) and all(map(on_host, node.args))


def call_name(node: Node) -> str | None:
    """The host's function for an operation."""
    return _CALLS.get(node.attrs["fn"] if node.op == "call" else node.op)


def choice(node: Node) -> tuple[Node, Node | None, Node | None]:
    """A condition, and the value on either side of it."""
    if node.op == "ifout":
        return node.args[0], node.attrs["then"], node.attrs["other"]
    cond, a, b = node.args
    return cond, a, b


def gradient_name(name: str) -> str:
    """The gradient's pointer for a forward pointer: X -> DX, x_ptr -> d_x_ptr."""
    return "D" + name if name[:1].isupper() else "d_" + name


def upstream_name(name: str, inplace: set[str]) -> str:
    """The upstream gradient's pointer; one of its own where another gradient takes its place."""
    return gradient_name(name) + "_out" * (name in inplace)


def outside(text: str) -> Iterator[int]:
    """The places of a text that are outside brackets."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            yield i


def one_term(text: str) -> bool:
    """Whether a text has no sum outside brackets: `c - a + b` is not `c -= a + b`."""
    return not any(text[i : i + 3] in (" + ", " - ") for i in outside(text))


def negated(cond: str) -> str:
    if cond.count(" == ") == 1 and not any(word in cond for word in (" and ", " or ", "not ")):
        return cond.replace(" == ", " != ")
    return f"not {cond}" if cond.isidentifier() else f"not ({cond})"


def number_text(value: object) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return 'float("nan")'
        if value in (float("inf"), float("-inf")):
            return ("-" if value < 0 else "") + 'float("inf")'
    return json.dumps(value) if isinstance(value, str) else repr(value)


def python_number(node: Node) -> bool:
    """Whether the interpreter may hold a Python number here, which has no methods."""
    if node.op in ("iv", "phi", "const", "constexpr"):
        return True
    return node.op in INFIX and all(map(python_number, node.args))

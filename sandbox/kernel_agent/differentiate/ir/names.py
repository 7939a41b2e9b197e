"""Names for values that the user did not name: after the operation and what it is applied to."""

from __future__ import annotations

from .nodes import Node
from .spelling import gradient_name

LINEAR_STEP = "linear_step"  # the combine function of first-order recurrences, which the section defines
LINEAR_STEPS = "linear_steps"  # a scan of such, of factors that may be greater than 1
_CALLS = {"rsqrt": "rsqrt", "sqrt": "root", "sigmoid": "sig"}


def stem(pointer: str) -> str:
    """x_ptr -> x."""
    return pointer.removesuffix("_ptr").removesuffix("_ptrs") or pointer


def adjoint_name(pointer: str) -> str:
    """x_ptr -> d_x, X -> DX."""
    return gradient_name(stem(pointer))


def suggested(node: Node, addresses: dict[Node, str]) -> str:
    """What `node` is called; `addresses` has the pointer that a value is an offset of."""
    if node in addresses:
        return addresses[node]
    op = node.op
    if op == "pid":
        return f"pid_{node.attrs['axis']}"
    if op == "arange":
        return "lanes"
    if op in ("compare", "and", "or", "not"):
        return "mask" if node.shape else "cond"
    if op == "load":
        name = stem(node.args[0].attrs["name"])
        return gradient_name(name) if node.attrs.get("upstream") else name
    if op == "cast" and not node.is_float:
        return f"{_named(node.args[0], addresses) or 'n'}_{node.dtype.removeprefix('int')}"
    if not node.is_float:
        return "n" if not node.shape else "at"
    if node.upstream:
        return "d"
    of = _named(node.args[0], addresses) if node.args else None
    if of is None:
        return _CALLS.get(node.attrs["fn"], "value") if op == "call" else "value"
    if op == "reduce":
        return f"{of}_{node.attrs['fn']}"
    if op == "call":
        return f"{_CALLS.get(node.attrs['fn'], node.attrs['fn'])}_{of}"
    if op == "permute":
        return f"{of}_t"
    if op == "cast":
        return f"{of}_as"
    return "value"


def _named(node: Node, addresses: dict[Node, str]) -> str | None:
    """The user's name of a value, looking through casts and the like."""
    while node.hint is None and node.op in ("cast", "expand", "broadcast", "permute"):
        node = node.args[0]
    if node.hint is not None:
        return node.hint
    return suggested(node, addresses) if node.op == "load" else None

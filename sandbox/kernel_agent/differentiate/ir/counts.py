"""Numbers that differ between programs because they are data, and of which the host can find the greatest:
the steps of a loop over a packed sequence.

    T = tl.load(cu + n + 1) - tl.load(cu + n)

The host computes such a number for all programs at once, from the same tensors.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from .folding import COMPARE
from .graph import Graph
from .nodes import Node, nodes_in, sides

OP = "longest"
_COMPUTED = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_BOUNDED = {"minimum": "max", "maximum": "min"}  # and the bound that they are


def longest(g: Graph, count: Node) -> Node | None:
    """The greatest value of an integer over all programs; None where the host cannot compute it."""
    return g.make(OP, (count,), {}, "int32", ()) if _known(count) else None


def _known(node: Node) -> bool:
    if node.shape or node.is_float:
        return False
    if node.op == "load":
        return len(node.args) == 2 and node.args[0].op == "param" and _known(node.args[1])
    if node.op == "ifout":
        return (
            node.attrs["if"].static
            and len(sides(node)) == 2
            and None not in sides(node)
            and all(map(_known, sides(node)))
        )
    if node.op in ("pid", "npid", "param", "constexpr", "const"):
        return True
    return node.op in {*_INFIX, *_BOUNDED, "cdiv", "cast", "compare", "where"} and all(map(_known, node.args))


def _varies(node: Node) -> bool:
    """Whether a number is another in each program: a tensor on the host."""
    return any(part.op in ("pid", "load") for part in nodes_in([node]))


def text(node: Node, of: Any) -> str:
    """A number of `longest` for all programs in source text; `of` spells what is the same for all."""
    if node.op == "pid":
        return f"pid[{node.attrs['axis']}]"
    if node.op == "load":
        return f"{of(node.args[0])}.flatten()[{text(node.args[1], of)}]"
    if node.op == "cast":
        return text(node.args[0], of)
    if node.op == "ifout":
        one, other = (text(side, of) for side in sides(node))
        return f"({one} if {of(node.args[0])} else {other})"
    if node.op == "cdiv":
        a, b = (text(arg, of) for arg in node.args)
        return f"-(-{a} // {b})"
    if node.op in _INFIX or node.op == "compare":
        a, b = (text(arg, of) for arg in node.args)
        return f"({a} {_INFIX.get(node.op) or node.attrs['cmp']} {b})"
    if node.op in _BOUNDED and _varies(node):
        first, second = sorted(node.args, key=_varies, reverse=True)
        return f"torch.clamp({text(first, of)}, {_BOUNDED[node.op]}={text(second, of)})"
    if node.op in _BOUNDED:
        return f"{node.op[:3]}({text(node.args[0], of)}, {text(node.args[1], of)})"
    if node.op == "where":
        cond, a, b = (text(arg, of) for arg in node.args)
        return f"torch.where({cond}, {a}, {b})" if _varies(node.args[0]) else f"({a} if {cond} else {b})"
    return of(node)


def traced(g: Graph, node: Node, args: dict[str, Any], grid: tuple[int, ...]) -> int | None:
    """The value of `longest` in the traced call; None where it asks for a tensor that this has not."""
    counts = [*grid, 1, 1][:3]
    pids = torch.cartesian_prod(*(torch.arange(n) for n in counts)).T

    def value(n: Node) -> Any:
        if n.op == "pid":
            return pids[n.attrs["axis"]]
        if n.op == "npid":
            return counts[n.attrs["axis"]]
        if n.op == "load":
            table = args.get(n.args[0].attrs["name"])
            if not isinstance(table, torch.Tensor):
                raise LookupError
            return table.detach().cpu().flatten()[value(n.args[1])]
        if n.op == "cast":
            return value(n.args[0])
        if n.op == "ifout":
            return value(sides(n)[0 if g.concrete(n.args[0]) else 1])
        if n.op == "cdiv":
            a, b = map(value, n.args)
            return -(-a // b)
        if n.op in _INFIX:
            a, b = map(value, n.args)
            return _COMPUTED[n.op](a, b)
        if n.op == "compare":
            a, b = map(value, n.args)
            return COMPARE[n.attrs["cmp"]](a, b)
        if n.op in _BOUNDED:
            a, b = (torch.as_tensor(value(arg)) for arg in n.args)
            return getattr(torch, n.op)(a, b)
        if n.op == "where":
            cond, a, b = (torch.as_tensor(value(arg)) for arg in n.args)
            return torch.where(cond, a, b)
        known = g.concrete(n)
        if known is None:
            raise LookupError
        return known

    try:
        return int(torch.as_tensor(value(node.args[0])).max())
    except (LookupError, RuntimeError, TypeError):
        return None

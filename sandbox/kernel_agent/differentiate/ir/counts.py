"""Numbers that differ between programs because they are data, and of which the host can find the greatest:
the steps of a loop over a packed sequence.

    T = tl.load(cu + n + 1) - tl.load(cu + n)

The host computes such a number for all programs at once, from the same tensors.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from .graph import Graph
from .nodes import Node, Region, nodes_in, sides
from .rewriter import Rewriter
from .spelling import on_host

OP = "longest"
_COMPUTED = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}


def longest(g: Graph, count: Node, steps: Region | None = None) -> Node | None:
    """The greatest value of an integer over all programs; None where the host cannot compute it. `steps`: over
    all steps of a loop instead, which then stand for programs."""
    if steps is None:
        return g.make(OP, (count,), {}, "int32", ()) if _known(count) else None
    assert steps.iv is not None and steps.bounds is not None
    low, high, step = steps.bounds
    if any(n.op == "pid" for n in nodes_in([count])):
        return None
    at = g.intern("pid", (), {"axis": 0, "kernel": "steps"}, "int32", ())
    count = Rewriter(g, {steps.iv: g.add(low, g.mul(at, step))}.get).node(count)
    number = g.make("cdiv", (g.sub(high, low), step))
    return g.make(OP, (count, number), {}, "int32", ()) if _known(count) and on_host(number) else None


def _known(node: Node) -> bool:
    if node.shape or node.is_float:
        return False
    if node.op == "load":
        plain = len(node.args) == 2 or "before" in node.attrs
        asked = [arg for n in node.args[1:] for arg in (n.args if n.op == "compare" else (n,))]
        return plain and node.args[0].op == "param" and all(map(_known, asked))
    if node.op == "ifout":
        return (
            node.attrs["if"].static
            and len(sides(node)) == 2
            and None not in sides(node)
            and all(map(_known, sides(node)))
        )
    if node.op in ("pid", "npid", "param", "constexpr", "const"):
        return True
    if node.op == "where" and "before" in node.attrs:
        return all(map(_known, (*node.args[0].args, *node.args[1:])))
    return node.op in {*_INFIX, "cdiv", "cast"} and all(map(_known, node.args))


def text(node: Node, of: Any) -> str:
    """A number of `longest` for all programs in source text; `of` spells what is the same for all."""
    if node.op == "pid":
        return f"pid[{node.attrs['axis']}]"
    if node.op == "load":
        found = f"{of(node.args[0])}.flatten()[{text(node.args[1], of)}]"
        return found if len(node.args) == 2 else _where(node.args[2], found, text(node.args[3], of), of)
    if node.op == "cast":
        return text(node.args[0], of)
    if node.op == "ifout":
        one, other = (text(side, of) for side in sides(node))
        return f"({one} if {of(node.args[0])} else {other})"
    if node.op == "cdiv":
        a, b = (text(arg, of) for arg in node.args)
        return f"-(-{a} // {b})"
    if node.op == "where":
        cond, one, other = node.args
        return _where(cond, text(one, of), text(other, of), of)
    if node.op in _INFIX or node.op == "compare":
        a, b = (text(arg, of) for arg in node.args)
        return f"({a} {_INFIX.get(node.op) or node.attrs['cmp']} {b})"
    return of(node)


def _where(cond: Node, one: str, other: str, of: Any) -> str:
    return f"torch.where({text(cond, of)}, {one}, {other})"


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
            if len(n.args) > 2:
                raise LookupError
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
        known = g.concrete(n)
        if known is None:
            raise LookupError
        return known

    try:
        return int(torch.as_tensor(value(node.args[0])).max())
    except (LookupError, RuntimeError, TypeError):
        return None

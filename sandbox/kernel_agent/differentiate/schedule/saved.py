"""Statistics that took a loop: a copy of the forward kernel saves them, and the backward needs that loop no
more.

The maximum and the sum of a softmax, mean and deviation of a long row: few numbers a program, which the
forward has in variables where its kernel ends. The copy is the user's text with one store more for each.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..ir.nodes import Node, nodes_in, operands, reachable
from ..ir.rewriter import Rewriter
from ..ir.values import assigned_names, takes_loop
from ..read.trace import Site, program_axes
from ..reverse.sweep import Reverse
from .programs import program_variables


@dataclass
class Saved:
    """A variable of the forward kernel, kept for the backward: `numel` elements a program."""

    variable: str
    buffer: str
    dtype: str
    shape: tuple[Node, ...]  # of at most one axis
    numel: Node


def use(reverse: Reverse, site: Site) -> list[Saved]:
    """Replace what took a loop of the forward by loads of what its copy saves; nothing where some of it is in
    no variable, as the loop would run for the rest."""
    g = reverse.kernel.graph
    found = _cut(reverse, site)
    loads: dict[Node, Node] = {}
    made: dict[str, Saved] = {}
    taken = {n.arg for n in site.source.args.args} | _names(site.source)
    for node, name in found.items():
        if name not in made:
            buffer = f"saved_{name}"
            while buffer in taken:
                buffer += "_"
            made[name] = Saved(name, buffer, node.dtype, node.shape, g.product(node.shape))
        kept = made[name]
        g.reverse, g.line = False, node.line
        with g.at(node.home):
            index = g.mul(_program(reverse, program_axes(site)), kept.numel)
            for axis in range(len(kept.shape)):
                index = g.add(index, g.lanes(kept.shape, axis))
            base = g.scratch(kept.buffer, kept.dtype)
            attrs = {"other": False, "buffer": True, "saved": True}
            loads[node] = g.make("load", (base, index), attrs, kept.dtype, kept.shape)
        loads[node].hint = node.hint or name
    g.reverse = True
    if not loads:
        return []
    effects = Rewriter(g, loads.get).effects(reverse.effects)
    axes = program_axes(site)
    before, after = (program_variables(reverse.kernel, e, axes) for e in (reverse.effects, effects))
    if len(before.virtual) != len(after.virtual):
        return []  # programs that are grouped into tiles are known by their tiles alone
    reverse.effects = effects
    for node, name in found.items():
        reverse.say(node.line, "saved", "none", f"`{name}` took a loop: the forward saves it")
    return list(made.values())


def _cut(reverse: Reverse, site: Site) -> dict[Node, str]:
    """The variables that stand between the backward and the forward's loops."""
    kernel, source = reverse.kernel, site.source
    plain = not (
        site.autotuned
        or site.heuristics
        or site.launch.heuristics
        or site.tables
        or kernel.inplace
        or kernel.apart
    )
    if not plain:
        return {}
    certain = {
        name
        for statement in source.body
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for name in assigned_names([statement])
    }
    rank = max((len(n.shape) for n in nodes_in(kernel.effects) if n.op == "load"), default=0)
    named = {
        node: name
        for name, node in kernel.variables.items()
        if name in certain and _may_be_saved(node) and len(node.shape) < max(rank, 1)
    }
    named |= {new: named[old] for new, old in kernel.equal.items() if old in named}
    found: dict[Node, str] = {}
    left: list[Node] = []

    def parts(item: object) -> list:
        return [] if isinstance(item, Node) and item in named else operands(item)

    for item in reachable(reverse.effects, parts):
        if not isinstance(item, Node):
            continue
        if item in named:
            found[item] = named[item]
        elif (
            item.op == "loopout" and item.is_float and item.attrs["loop"].source is None and not item.reverse
        ):
            left.append(item)
    return {} if left else found


def _may_be_saved(node: Node) -> bool:
    """Whether a variable is few numbers, and what a store of Triton can keep."""
    return (
        node.dtype in ("float32", "float64")
        and not any(region.is_loop for region in node.home.chain())
        and len(node.shape) <= 1
        and all(dim.op in ("const", "constexpr") for dim in node.shape)
        and takes_loop(node)
        and not any(n.op == "load" and n.attrs.get("upstream") for n in nodes_in([node]))
    )


def _program(reverse: Reverse, axes: list[int]) -> Node:
    """The number of a program, along the axes that have more than one; neighbours along the first are next
    to each other, as their rows are."""
    g = reverse.kernel.graph
    total: Node = g.const(0)
    for axis in reversed(axes):
        here = g.pid(axis)
        total = g.cast(here, "int64") if total.op == "const" else g.add(g.mul(total, g.npid(axis)), here)
    return total


def _names(source: ast.FunctionDef) -> set[str]:
    return {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}

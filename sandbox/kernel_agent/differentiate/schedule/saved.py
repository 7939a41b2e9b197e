"""Statistics that took a loop: a copy of the forward kernel saves them, and the backward needs that loop no
more.

The maximum and the sum of a softmax, mean and deviation of a long row: few numbers a program, which the
forward has in variables where its kernel ends. The copy is the user's text with one store more for each.

Where a program of the backward walks rows, a number that took a sum over a row (`dear`) is as dear: the
sums of one row wait for each other, and the next row for them. So may be what random numbers decide: to draw
one takes more time than to load a byte. And so is the number of the step that a loop chose, one for each
lane, as in a max pooling. Of the first two also what a call gives that the copy can make once more, as
`tl.sum(e, axis=0)` within a statement: there the compiler has it already.

A copy with an autotuner chooses blocks of its own, and the backward has those of one configuration. So what
is saved lies by rows, not by programs, and is something of a row whatever the blocks (`prove/blocks.py`); and
the copy has as many rows as the backward: its blocks are multiples of the backward's.
"""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...source import tree_nodes
from ..ir.graph import Graph
from ..ir.nodes import Node, nodes_in, operands, reachable
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_number
from ..ir.values import assigned_names, takes_loop
from ..prove.blocks import Blocks, Hangs
from ..read.block_sizes import Grid
from ..read.trace import Site, grid_rows, program_axes
from ..reverse.sweep import Reverse
from .programs import program_variables


@dataclass
class Saved:
    """A variable of the forward kernel, or a call, kept for the backward: `numel` elements a program."""

    text: str
    buffer: str
    dtype: str
    shape: tuple[Node, ...]  # of at most one axis, or two where it is a block that a loop leaves
    numel: Node
    row: int | None = None  # the grid axis that shares out the rows that it is of, if the copy chooses blocks
    cut: Any = None  # of a tile: where it is stored, as a matrix (see `saved_tiles`)
    taped: Any = None  # of a number of every step: its call, and how many steps (see `saved_numbers`)


@dataclass(frozen=True)
class Copied:
    """How a launch may be made with a copy of its kernel: meta-parameters that vary, grid axes by rows with
    their block, and the configurations that the copy leaves its autotuner, if not all of them."""

    varied: frozenset[str]
    rows: dict[int, str]
    left: str = ""  # a condition on a configuration `c`


def offers(reverse: Reverse, site: Site) -> bool:
    """Whether a copy of the forward could save what is dear, beside what took a loop."""
    copied, won = copies(site), _won(reverse)
    found = {} if copied is None else _cut(reverse, site, copied, True)
    return any(not takes_loop(node) or node in won for node in found)


def use(reverse: Reverse, site: Site, dear: bool = False) -> list[Saved]:
    """Replace what took a loop of the forward by loads of what its copy saves; nothing where some of it is in
    no variable, as the loop would run for the rest. `dear`: also numbers that took a sum, and blocks that
    random numbers decide."""
    g = reverse.kernel.graph
    copied = copies(site)
    found = {} if copied is None else _cut(reverse, site, copied, dear)
    if not found or copied is None:
        return []
    loads: dict[Node, Node] = {}
    made: dict[str, Saved] = {}
    taken = names_in(site.source)
    for node, text in found.items():
        called = re.sub(r"\W.*", "", text.removeprefix(f"{reverse.kernel.tl}."))
        name = text if text.isidentifier() else f"row_{called}" if called in vars(builtins) else called
        if text not in made:
            buffer = free_name(f"saved_{name}", taken)
            taken.add(buffer)
            row = next(iter(copied.rows), None)
            made[text] = Saved(text, buffer, node.dtype, node.shape, g.product(node.shape), row)
        kept = made[text]
        g.reverse, g.line = False, node.line
        with g.at(node.home):
            index = g.mul(program_number(g, ordered(site, kept.row)), kept.numel)
            for axis in range(len(kept.shape)):
                index = g.add(index, g.lanes(kept.shape, axis))
            base = g.scratch(kept.buffer, kept.dtype)
            attrs = {"other": False, "buffer": True, "saved": True}
            loads[node] = g.make("load", (base, index), attrs, kept.dtype, kept.shape)
        loads[node].hint = node.hint or name
        if (under := _inverted(node)) is not None:
            with g.at(node.home):
                loads[under] = g.div(g.number(1), loads[node])
    g.reverse = True
    if not loads:
        return []
    effects = Rewriter(g, loads.get).effects(reverse.effects)
    axes = program_axes(site)
    before, after = (program_variables(reverse.kernel, e, axes) for e in (reverse.effects, effects))
    if len(before.virtual) != len(after.virtual):
        return []  # programs that are grouped into tiles are known by their tiles alone
    reverse.effects = effects
    for node, text in found.items():
        took = (
            "a loop" if takes_loop(node) else "random numbers" if _is_random(node) else "a sum over the row"
        )
        reverse.say(node.line, "saved", "none", f"`{text}` took {took}: the forward saves it")
    return list(made.values())


def copyable(site: Site) -> bool:
    """Whether a copy of the kernel may be launched in its place."""
    if site.home.imported:  # its names may be others in the user's file
        return False
    if any(_is_of_a_library(vars(site.home.module).get(name)) for name in names_in(site.source)):
        return False
    kernel, computed = site.kernel, set(site.launch.heuristics) - set(site.heuristics)
    if site.tables or kernel.inplace or kernel.apart or computed:
        return False
    return len(_tuners(site)) == site.autotuned


def _tuners(site: Site) -> list[ast.Call]:
    calls = [d for d in site.source.decorator_list if isinstance(d, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).endswith("autotune")]


def copies(site: Site) -> Copied | None:
    """How a copy of the kernel that saves few numbers a program may be launched; None where it may not."""
    if not copyable(site):
        return None
    tuners = _tuners(site)
    names = {name for config in site.configs for name in config}
    varied = {n for n in names if len({repr(config.get(n)) for config in site.configs}) > 1}
    varied |= {name for name, rule in site.heuristics.items() if varied and _reads(rule, varied)}
    rows = grid_rows(site, varied) if varied else {}
    if rows is None or len(rows) > 1:
        return None
    left = ""
    for block in rows.values():
        own = (site.launch.config or {}).get(block)
        sizes = [size for config in site.configs if isinstance(size := config.get(block), int)]
        if not isinstance(own, int) or len(sizes) < len(site.configs):
            return None
        if any(size % own for size in sizes):
            if any(k.arg != "configs" and k.arg != "key" for k in tuners[0].keywords):
                return None  # what else looks at the list may want all of it
            left = f'c.kwargs["{block}"] % {own} == 0'
    return Copied(frozenset(varied), rows, left)


def _is_of_a_library(value: Any) -> bool:
    """Whether a name in a kernel is a module that no kernel of a backward part may use."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in ("triton", "math")


def _reads(rule: ast.expr, varied: set[str]) -> bool:
    """Whether a heuristic may hang on some parameters."""
    known = {n.value for n in tree_nodes(rule) if isinstance(n, ast.Constant)}
    return not isinstance(rule, ast.Lambda) or bool(known & varied)


def ordered(site: Site, row: int | None) -> list[int]:
    """The axes by which programs are numbered, the first fastest: rows, where there are any."""
    axes = program_axes(site)
    return axes if row is None else [row, *(axis for axis in axes if axis != row)]


def _cut(reverse: Reverse, site: Site, copied: Copied, dear: bool) -> dict[Node, str]:
    """The variables and calls that stand between the backward and the forward's loops, and what is `dear`."""
    kernel = reverse.kernel
    certain = certain_names(site.source)
    rank = max((len(n.shape) for n in nodes_in(kernel.effects) if n.op == "load"), default=0)
    won = _won(reverse) if dear else set()
    named = {
        node: text
        for node, text in kernel.calls.items()
        if dear and not takes_loop(node) and _may_be_saved(node, dear, rank)
    }
    named |= {
        node: name
        for name, node in kernel.variables.items()
        if name in certain and (_may_be_saved(node, dear, rank) or (node in won and _is_plain(node)))
    }
    named |= {new: named[old] for new, old in kernel.equal.items() if old in named}
    if isinstance(site.blocks, Grid):
        return {}
    if copied.varied:
        blocks = Blocks(kernel.graph, copied.varied, copied.rows)
    elif site.blocks is not None:  # what lies by rows is the same in fewer of them
        blocks = Blocks(kernel.graph, site.blocks.sizes, {site.blocks.axis: site.blocks.rows})
    else:
        blocks = None
    if blocks is not None:
        proven = {name for node, name in named.items() if _by_rows(blocks, node)}
        named = {node: name for node, name in named.items() if name in proven}
    inverted = {under: node for node in named if (under := _inverted(node)) is not None}
    found: dict[Node, str] = {}
    left: list[Node] = []

    def parts(item: object) -> list:
        known = isinstance(item, Node) and (item in named or item in inverted)
        return [] if known else operands(item)

    for item in reachable(reverse.effects, parts):
        if not isinstance(item, Node):
            continue
        item = inverted.get(item, item)
        if item in named:
            found[item] = named[item]
        elif (
            item.op == "loopout" and item.is_float and item.attrs["loop"].source is None and not item.reverse
        ):
            left.append(item)
    return {} if left else found


def certain_names(source: ast.FunctionDef) -> set[str]:
    """The variables that a kernel assigns outside of loops and branches."""
    return {
        name
        for statement in source.body
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for name in assigned_names([statement])
    }


def _inverted(node: Node) -> Node | None:
    """What a number is one by: sqrt(v), of 1 / sqrt(v)."""
    return node.args[1] if node.op == "div" and is_number(node.args[0], 1) and not node.shape else None


def _won(reverse: Reverse) -> set[Node]:
    """The numbers of steps that loops chose."""
    return {won.last for won in reverse.won.values() if won.last.dtype == "int32"}


def _is_plain(node: Node) -> bool:
    """Whether a value is a block of one axis at most, of each program, in no loop."""
    return (
        not any(region.is_loop for region in node.home.chain())
        and len(node.shape) <= 1
        and all(dim.op in ("const", "constexpr") for dim in node.shape)
    )


def _may_be_saved(node: Node, dear: bool, rank: int) -> bool:
    """Whether a value is few numbers that were dear, and what a store of Triton can keep; `rank`: of the
    blocks that the kernel loads."""
    summed = dear and not node.shape and any(n.op == "reduce" for n in nodes_in([node]))
    drawn = dear and _is_random(node)
    return (
        node.dtype in ("float32", "float64", *["int1"] * drawn)
        and _is_plain(node)
        and len(node.shape) < max(rank, 1) + drawn
        and (summed or drawn or takes_loop(node))
        and not any(n.op == "load" and n.attrs.get("upstream") for n in nodes_in([node]))
    )


def _is_random(node: Node) -> bool:
    """Whether a value is what random numbers decide, and nothing that is loaded: a comparison of some."""
    found = {n.op for n in nodes_in([node])}
    return node.dtype == "int1" and "random" in found and "load" not in found


def _by_rows(blocks: Blocks, node: Node) -> bool:
    """Whether the copy has the same of each row, whatever blocks it chooses."""
    try:
        row = blocks.row_of(node)
    except Hangs:
        return False
    return not blocks.rows or row in blocks.rows


def program_number(g: Graph, axes: list[int]) -> Node:
    """The number of a program, along axes from the fastest on: neighbours along the first are next to each
    other, as their rows are."""
    total: Node = g.const(0)
    for axis in reversed(axes):
        here = g.pid(axis)
        total = g.cast(here, "int64") if total.op == "const" else g.add(g.mul(total, g.npid(axis)), here)
    return total


def names_in(source: ast.FunctionDef) -> set[str]:
    """All names of a kernel: its parameters, and those that its text has."""
    return {n.id for n in tree_nodes(source) if isinstance(n, ast.Name)} | {n.arg for n in source.args.args}


def free_name(name: str, taken: set[str]) -> str:
    """The name, or one like it, that is not taken."""
    while name in taken:
        name += "_"
    return name

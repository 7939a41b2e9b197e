"""The axes of products that one block stands for: rows, columns and what is summed, each under its own name.

    tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)                  BLOCK_M
    for start in range(0, K, BLOCK): start + tl.arange(0, BLOCK)    BLOCK_K

Each use of a block is read as if it were another one. Sizes that have to be equal are then one axis, and so
are lanes and what makes positions of them: the number of a program, or a step. A count of blocks goes with
the axis whose lanes are masked to lie below the same length. Where two axes of a product have to be equal, as
where a tile is added to its transpose, their block stays one.

Any such names are right, as all have the block's value. Whether they may have values of their own is proven
of the kernel that is read with them (`own_tiles`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...source import tree_nodes
from ..ir.nodes import Node, nodes_in
from ..ir.refusal import Refusal
from ..ir.values import Kernel
from ..prove.affine import Affine, Form, Var, _combine, nonzero
from ..read.block_uses import Each, Uses
from ..read.trace import Site

AXES = "MNK"  # of a product: rows, columns, and what is summed


def find(site: Site) -> Uses | None:
    """Names for the uses of blocks that stand for several axes of a launch's products."""
    dots = [n for n in nodes_in(site.kernel.effects) if n.op == "dot"]
    names = [[n.attrs["name"] for n in _sizes(dot) if n.op == "constexpr"] for dot in dots]
    blocks = {name for one in names for name in one if one.count(name) > 1 and name in site.args}
    if not blocks or site.again is None:
        return None
    each = Each(blocks)
    try:
        kernel = site.again({}, None, each)
    except Refusal:  # a number is asked of a block, say
        return None
    alike = Alike(kernel, each)
    axes = alike.axes()
    several = {b for b in blocks if sum(each.of[name] == b for name in axes) > 1}
    new = {name: f"{each.of[name]}_{axis}" for name, axis in axes.items() if each.of[name] in several}
    if not new or _taken(site) & {*new.values()}:
        return None
    roots = {use: alike.root(name) for use, name in each.names.items()}
    return Uses(
        {use: new[root] for use, root in roots.items() if root in new},
        {new[name]: each.of[name] for name in sorted(new)},
    )


def _sizes(dot: Node) -> tuple[Node, Node, Node]:
    """Of the axes of a product."""
    return dot.shape[-2], dot.shape[-1], dot.args[0].shape[-1]


def _taken(site: Site) -> set[str]:
    """Names that a kernel or the function that launches it has for something."""
    nodes = [*tree_nodes(site.source), *tree_nodes(site.host)]
    found = {n.id for n in nodes if isinstance(n, ast.Name)}
    found |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    return found | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


class Alike:
    """Which names of uses have to be of one size, in a kernel that is read with a name for each."""

    def __init__(self, kernel: Kernel, each: Each) -> None:
        self.kernel, self.affine = kernel, Affine(kernel.graph)
        self.above = {name: name for name in each.of}
        self.below: dict[str, set[str]] = {}  # by a length, the sizes of lanes that are masked to lie below
        for one, other in kernel.graph.met:
            self.join(one, other)
        nodes = list(nodes_in(kernel.effects))
        self.uses = [n for n in kernel.graph.table.values() if self.known(n)]
        for node in nodes:
            self.position(node)
        for node in kernel.graph.table.values():
            self.counted(node)

    def known(self, node: Node) -> bool:
        return node.op == "constexpr" and node.attrs["name"] in self.above

    def root(self, name: str) -> str:
        while self.above[name] != name:
            name = self.above[name]
        return name

    def join(self, one: Node, other: Node) -> None:
        """Two sizes are one. With what is no use of a block, a size stays as it is."""
        first, second = (n.attrs["name"] if self.known(n) else "" for n in (one, other))
        self.above.setdefault("", "")
        if first != second:
            roots = sorted((self.root(first), self.root(second)))  # what is none is the root of all
            self.above[roots[1]] = roots[0]

    def position(self, node: Node) -> None:
        """Lanes and what they are added to, as in `pid * BLOCK + lane` or `lane < n - step * BLOCK`."""
        axes = tuple(range(len(node.shape)))
        if node.op in ("add", "sub") and not node.is_float and node.shape:
            form = self.affine.terms(node, axes)
        elif node.op == "compare" and not any(arg.is_float for arg in node.args):
            one, other = (self.affine.terms(a, axes[len(axes) - len(a.shape) :]) for a in node.args)
            form = _combine(one, other, -1)
        else:
            return
        form = nonzero(form)
        for var, size in _lanes(form):
            if not self.known(size):
                continue
            for use in self.uses:
                step = {tuple(sorted((*ids, use.id))): factor for ids, factor in form[var,].items()}
                if any(len(key) == 1 and key != (var,) and form[key] == step for key in form):
                    self.join(use, size)
            if node.op == "compare" and node.attrs["cmp"] == "<" and form[var,] == {(): 1}:
                for length in _lengths(form, self.affine):
                    self.below.setdefault(length, set()).add(size.attrs["name"])

    def counted(self, node: Node) -> None:
        """How many blocks a length has."""
        if node.op == "cdiv" and self.known(node.args[1]):
            sizes = {self.root(name) for name in self.below.get(node.args[0].attrs.get("name", ""), ())}
            if len(sizes) == 1 and (size := sizes.pop()):
                self.above[self.root(node.args[1].attrs["name"])] = size

    def axes(self) -> dict[str, str]:
        """The axis of products that sizes are of, where each is of one, and each axis has one at most."""
        found: dict[str, str] = {}
        for dot in (n for n in nodes_in(self.kernel.effects) if n.op == "dot"):
            for axis, size in zip(AXES, _sizes(dot), strict=True):
                root = self.root(size.attrs["name"]) if self.known(size) else ""
                if root and found.setdefault(root, axis) != axis:
                    return {}
        return found if len({*found.values()}) == len(found) else {}


def _lanes(form: Form) -> Iterator[tuple[Var, Node]]:
    """The lanes of a sum, from zero, with how many there are."""
    for key in list(form):
        if len(key) == 1 and key[0] is not None and key[0].kind == "lane":
            low, size = key[0].node.args
            if low.op == "const" and low.value == 0:
                yield key[0], size


def _lengths(form: Form, affine: Affine) -> Iterator[str]:
    """The parameters that a sum has, as they are, taken away."""
    for ids, factor in form.get((), {}).items():
        if factor == -1 and len(ids) == 1 and affine.nodes[ids[0]].op == "param":
            yield affine.nodes[ids[0]].attrs["name"]

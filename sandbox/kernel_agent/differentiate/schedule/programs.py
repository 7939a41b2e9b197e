"""The programs of a forward kernel as variables: program ids, or the digits that the kernel splits them into.

`pid // H` and `pid % H` are two variables with pid = (pid // H) * H + pid % H, and a head may be split once
more into a group and a place in it: what an address contains is then owned, and what it does not contain is
summed over. Ids that are swizzled into tiles (grouped matmul) are replaced by the tile's row and column.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.graph import Graph
from ..ir.nodes import Node, nodes_in
from ..ir.values import Kernel
from ..prove.affine import Affine
from ..reverse.sweep import writes


@dataclass
class Programs:
    """`table`: values of the forward in terms of `virtual`, the variables, which know their counts."""

    table: dict[Node, Node] = field(default_factory=dict)
    virtual: list[Node] = field(default_factory=list)
    numbered: list[tuple[Node, Node]] = field(default_factory=list)  # (value, count): a program's number
    divisible: list[tuple[Node, Node]] = field(default_factory=list)  # (count, digits): asked of the host

    def variable(self, g: Graph, count: Node, hint: str) -> Node:
        """One more variable."""
        vpid = g.intern("vpid", (), {"axis": len(self.virtual), "count": count}, "int32", ())
        vpid.attrs["count"], vpid.hint = count, hint
        self.virtual.append(vpid)
        return vpid

    def of(self, node: Node) -> set[Node]:
        """The variables that a value of the table is made of."""
        return {n for n in nodes_in([self.table[node]]) if n.op == "vpid"}


def program_variables(kernel: Kernel, effects: list, axes: list[int]) -> Programs:
    """The variables of a kernel's programs along `axes`."""
    g = kernel.graph
    nodes = list(nodes_in(effects))
    programs = Programs()
    for axis in axes:
        pid = g.pid(axis)
        pair = tiles_of(g, nodes, pid)
        if pair is not None:
            for (node, count), hint in zip(pair, ("tile_m", "tile_n"), strict=True):
                programs.table[node] = programs.variable(g, count, node.hint or hint)
                programs.numbered.append((node, count))
            continue
        count = g.npid(axis)
        programs.numbered.append((pid, count))
        _digits(g, programs, nodes, effects, [pid], count, f"program_{axis}")
    return programs


def _digits(
    g: Graph,
    programs: Programs,
    nodes: list[Node],
    effects: list,
    forms: list[Node],
    count: Node,
    hint: str,
    depth: int = 0,
) -> Node:
    """Split a value (with its casts, `forms`) as the kernel does; returns it in terms of its variables."""
    casts = [n for n in nodes if n.op == "cast" and n.args[0] in forms]
    forms = [*forms, *casts]
    hint = next((n.hint for n in forms if n.hint), hint)
    divisor = _divisor(g, nodes, effects, forms) if depth < 2 else None
    if divisor is None:
        value = programs.variable(g, count, hint)
    else:
        high = [n for n in nodes if n.op == "floordiv" and n.args[0] in forms and n.args[1] is divisor]
        low = [n for n in nodes if n.op == "mod" and n.args[0] in forms and n.args[1] is divisor]
        programs.divisible.append((count, divisor))
        whole = g.make("cdiv", (count, divisor))
        h = _digits(g, programs, nodes, effects, high, whole, f"{hint}_high", depth + 1)
        l = _digits(g, programs, nodes, effects, low, divisor, f"{hint}_low", depth + 1)
        value = g.add(g.mul(h, divisor), l)
    for form in forms:
        programs.table[form] = value if form.dtype == value.dtype else g.cast(value, form.dtype)
    return value


def _divisor(g: Graph, nodes: list[Node], effects: list, forms: list[Node]) -> Node | None:
    """What a value is split by: where both digits are used, or an atomic address contains the higher one."""
    affine = Affine(g)
    uses: dict[Node, set[str]] = {}
    for n in nodes:
        if n.op in ("floordiv", "mod") and n.args[0] in forms and affine.uniform(n.args[1]):
            uses.setdefault(n.args[1], set()).add(n.op)
    if len(uses) != 1:  # split in one way, or not at all
        return None
    ((divisor, ops),) = uses.items()
    low = [n for n in nodes if n.op == "mod" and n.args[0] in forms and n.args[1] is divisor]
    if any(n.op in ("floordiv", "mod") and n.args[0] in low and not affine.uniform(n.args[1]) for n in nodes):
        return None  # a swizzle with ragged groups
    if len(ops) == 2:
        return divisor
    added = [w.offset for w in writes(effects) if w.kind == "atomic_add"]
    return divisor if any(n.op in ops and n.args[0] in forms for n in nodes_in(added)) else None


def tiles_of(g: Graph, nodes: list[Node], pid: Node) -> tuple[tuple[Node, Node], tuple[Node, Node]] | None:
    """Two nodes that are a bijection of a program id onto a grid of tiles, if nothing else uses the id."""
    affine = Affine(g)
    for col in nodes:
        if col.op == "floordiv" and col.args[0].op == "mod" and col.args[0].args[0] is pid:
            found = _grouped(g, affine, nodes, pid, col)
            if found is not None and _only_through(nodes, pid, {found[0][0], found[1][0]}):
                return found
    return None


def row_by_row(nodes: list[Node], pid: Node) -> tuple[tuple[Node, None], tuple[Node, Node]] | None:
    """pid -> (pid // columns, pid % columns), if nothing else uses the id. How many rows there are, only the
    grid says."""
    for col in nodes:
        if col.op == "mod" and col.args[0] is pid:
            row = next((n for n in nodes if n.op == "floordiv" and n.args == col.args), None)
            if row is not None and _only_through(nodes, pid, {row, col}):
                return (row, None), (col, col.args[1])
    return None


def _grouped(g: Graph, affine: Affine, nodes: list[Node], pid: Node, col: Node) -> tuple | None:
    """pid -> (first + (pid % T) % S, (pid % T) // S) with T = G * cols, first = pid // T * G, S = min(rows -
    first, G)."""
    local, height = col.args
    per_group = local.args[1]
    if height.op != "minimum" or per_group.op != "mul":
        return None
    for group, cols in (per_group.args, per_group.args[::-1]):
        if not (affine.uniform(group) and affine.uniform(cols)):
            continue
        first = g.mul(g.make("floordiv", (pid, per_group)), group)
        for left, limit in (height.args, height.args[::-1]):
            if limit is group and left.op == "sub" and left.args[1] is first and affine.uniform(left.args[0]):
                row = g.add(first, g.make("mod", (local, height)))
                if row in nodes:
                    return (row, left.args[0]), (col, cols)
    return None


def _only_through(nodes: list[Node], pid: Node, through: set[Node]) -> bool:
    """Whether every path from effects to the id passes one of `through`."""
    inner = set(nodes_in(through))
    outside = (arg for node in nodes if node not in inner for arg in node.args)
    return not any(arg in inner and arg not in through and pid in nodes_in([arg]) for arg in outside)

"""Rows that do not exist: whether all of them are alike, however far beyond the last.

    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)        M rows; the others have nothing to do
    x = tl.load(x_ptr + rows, mask=rows < M, other=0.0)
    visible = (cols[None, :] < M) & (cols[None, :] <= rows[:, None])

Nothing of such rows is stored, but sums over rows have them as terms, and zero times NaN would spoil those.
The forward's own blocks have some where M is not a multiple of them. Larger blocks have more, and a window
of columns around a row, say, is empty further on, where a softmax is 0 / 0. Where no value hangs on how far
beyond M a row lies, all of them have what the first one has. So a row's number may only be in addresses that
a mask keeps below M, and in comparisons that are decided from M on: with M, or with columns below M. It may
also be in an angle, or choose a random number, where nothing is divided by what that decides, and no function
taken of it: a row of which nothing is left is no worse then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..ir.nodes import Carry, Node, beneath, nodes_in, reachable, sides
from ..ir.simplify import is_number
from ..ir.values import is_static
from .affine import Form, Var, _combine, nonzero
from .blocks import PLACEWISE, SUMS, Blocks, Killers

Axes = tuple[int, ...]
Below = frozenset[tuple[frozenset, int]]  # sums, as by _split(), that are less than the length here
BOUNDED = ("sin", "cos")
FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">=", "==": "==", "!=": "!="}
# How far a sum may be above the length, where comparing it with a row from there on has one answer.
DECIDED = {"<": -1, ">=": -1, "==": -1, "!=": -1, "<=": 0, ">": 0}


class Beyond:
    """Rows of a grid axis from the argument `length` on; every access to them is masked to lie below it."""

    def __init__(self, blocks: Blocks, axis: int, length: str) -> None:
        self.blocks, self.affine, self.axis, self.length = blocks, blocks.affine, axis, length
        self.seen: dict[tuple, bool] = {}

    def alike(self, nodes: list[Node]) -> bool:
        """Whether values are the same in all such rows. Raises Hangs."""
        for _ in self.blocks.answers(nodes):
            self.seen = {}
            if not all(self._apart(node) for node in nodes):
                return False
        return True

    def _apart(self, node: Node) -> bool:
        """The same of a value of which nothing is known."""
        return self._visit(node, tuple(range(len(node.shape))), frozenset())

    def _visit(self, node: Node, axes: Axes, below: Below) -> bool:
        """Whether a value is, where the sums `below` are less than the length; `axes`: of the whole block,
        those that the value has."""
        key = (node.id, axes, below)
        if key not in self.seen:
            self.seen[key] = True  # what a loop carries is asked once
            self.seen[key] = self._asked(node, axes, below)
        return self.seen[key]

    def _asked(self, node: Node, axes: Axes, below: Below) -> bool:
        op, args = node.op, node.args
        if op == "pid":
            return node.attrs["axis"] != self.axis
        if op in SUMS and not node.is_float and self._is_row(self._terms(node, axes)):
            return False
        if op == "compare" and not any(arg.is_float for arg in args):
            sums = ((self._taken(arg), at) for arg, at in _placed(node, args, axes))
            one, other = (self._terms(arg, at) for arg, at in sums)
            difference = nonzero(_combine(one, other, -1))
            if self._is_row(difference):
                return self._decided(difference, node.attrs["cmp"], below)
        if op == "load":
            if any(n.op == "pid" and n.attrs["axis"] == self.axis for n in nodes_in(args[1:2])):
                args = args[3:]  # masked off
            else:
                args = args[1:]
        if op == "random":
            return True
        if op in ("div", "call") and _drawn(args[op == "div" :]):
            return False
        if op == "call" and node.attrs["fn"] in BOUNDED:
            return all(self._number(arg, at, below) for arg, at in _placed(node, args, axes))
        if op in ("and", "land"):
            below |= self._below(self.blocks.conditions(node, axes))
        if op == "where":
            return self._chosen(node, axes, below)
        if op == "loopout":
            carries = [n for c in node.attrs["loop"].carries for n in (c.init, c.next) if n is not None]
            return all(map(self._apart, carries))
        if op == "ifout" and is_static(args[0]):
            return (side := self._taken(node)) is node or self._visit(side, axes, below)
        if op == "ifout":
            args = tuple(n for n in (*args, node.attrs["then"], node.attrs["other"]) if n is not None)
        elif op not in PLACEWISE | SUMS | {"load", "full", "permute"}:
            return all(map(self._apart, args))
        return all(self._visit(arg, at, below) for arg, at in _placed(node, args, axes))

    def _number(self, node: Node, axes: Axes, below: Below) -> bool:
        """Whether a value is a number in all such rows, if it is one in the first."""
        if node.op in ("pid", "arange"):
            return True
        parts = list(_placed(node, node.args, axes))
        if node.op in SUMS:
            return all(self._number(arg, at, below) for arg, at in parts)
        if (side := self._taken(node)) is not node:
            return self._number(side, axes, below)
        if node.op in ("div", "floordiv", "mod"):
            return self._number(*parts[0], below) and self._visit(*parts[1], below)
        return self._visit(node, axes, below)

    def _chosen(self, node: Node, axes: Axes, below: Below) -> bool:
        """The same of a choice. Where columns are not below the length it may be the second value anyway."""
        cond, one, other = node.args
        last = beneath(other, "full", "broadcast", "cast")
        infinite = any(is_number(side, x) for side in (one, other) for x in (math.inf, -math.inf))
        if infinite and _drawn([cond]):
            return False
        within = below | self._below(self.blocks.conditions(cond, axes[len(axes) - len(cond.shape) :]))
        asked = below
        if last.op == "const" and isinstance(last.value, int | float):
            asked |= self._below(self.blocks.killers(node, axes, last.value))
        parts = ((cond, asked), (one, within | asked), (other, below))
        return all(self._visit(part, axes[len(axes) - len(part.shape) :], what) for part, what in parts)

    def _taken(self, node: Node) -> Node:
        """The value of the branch that is taken where a kernel is compiled."""
        while node.op == "ifout" and is_static(node.args[0]):
            side = node.attrs["then" if self.blocks.facts[node.args[0]] else "other"]
            if side is None:
                break
            node = side
        return node

    def _terms(self, node: Node, axes: Axes) -> Form:
        return nonzero(self.affine.terms(node, axes))

    def _is_row(self, form: Form) -> bool:
        """Whether a sum has the number of a program of the rows in it."""
        return any(v is not None and v.kind == "pid" and v.key[0] == self.axis for vs in form for v in vs)

    def _below(self, conditions: Killers) -> Below:
        """The sums that conditions ask to be less than the length."""
        found = set()
        for cond, axes in conditions.values():
            left, right = cond.args
            if cond.attrs["cmp"] == ">":
                left, right = right, left
            elif cond.attrs["cmp"] != "<":
                continue
            right = beneath(right, "broadcast", "expand", "cast")
            if right.attrs.get("name") == self.length and not left.is_float:
                found.add(_split(self._terms(left, axes[len(axes) - len(left.shape) :])))
        return frozenset(found)

    def _decided(self, difference: Form, cmp: str, below: Below) -> bool:
        """Whether `difference cmp 0` has one answer for all rows from the length on."""
        lanes = [vs[0] for vs in difference if len(vs) == 1 and self._is_lane(vs[0], difference)]
        if len(lanes) != 1:
            return False
        (sign,) = difference[lanes[0],].values()
        rest = {
            vs: {ids: -sign * factor for ids, factor in cs.items()}
            for vs, cs in difference.items()
            if vs != (lanes[0],) and not self._is_row({vs: cs})
        }  # compared with the row
        most = self._above(rest, below)
        return most is not None and most <= DECIDED[cmp if sign == -1 else FLIPPED[cmp]]

    def _is_lane(self, var: Var, form: Form) -> bool:
        """Whether a lane makes a row, as it is, with the one program number of a sum."""
        if var.kind != "lane" or var.node is None:
            return False
        sizes = self.affine.monomials(var.node.args[1])
        numbers = [(vs, cs) for vs, cs in form.items() if self._is_row({vs: cs})]
        if len(numbers) != 1 or len(numbers[0][0]) != 1 or len(sizes) != 1:
            return False
        factor, ids = sizes[0]
        own = form[var,]
        return own in ({(): 1}, {(): -1}) and numbers[0][1] == {ids: own[()] * factor}

    def _above(self, form: Form, below: Below) -> int | None:
        """How far above the length, which is 1 at least, a sum may be: if it is a number, or one beside the
        length or beside a sum that is known to be below it."""
        terms, number = _split(form)
        if not terms:
            return number - 1
        if any(terms == _split({(): {(i,): 1}})[0] for i in self._lengths()):
            return number
        return next((number - known - 1 for known_terms, known in below if known_terms == terms), None)

    def _lengths(self) -> list[int]:
        """The ids of the nodes that are the length, in sums."""
        return [i for i, node in self.affine.nodes.items() if node.attrs.get("name") == self.length]


def _drawn(nodes: Iterable[Node]) -> bool:
    """Whether values hang on random numbers."""
    carries: dict[Node, Carry] = {}

    def parts(node: Node) -> list[Node]:
        if node.op == "loopout":
            carries.update((carry.phi, carry) for carry in node.attrs["loop"].carries)
            node = node.attrs["loop"].carries[node.attrs["index"]].phi
        if node in carries:
            return [n for n in (carries[node].init, carries[node].next) if n is not None]
        return [*node.args, *(sides(node) if node.op == "ifout" else [])]

    return any(node.op == "random" for node in reachable(nodes, parts))


def _placed(node: Node, args: Iterable[Node], axes: Axes) -> Iterator[tuple[Node, Axes]]:
    """Arguments of an operation that is done for each place apart, with the axes of the whole block that they
    have."""
    for arg in args:
        if node.op == "expand":
            at = node.attrs["axis"]
            yield arg, (*axes[:at], *axes[at + 1 :])
        elif node.op == "permute":
            back = {axis: axes[at] for at, axis in enumerate(node.attrs["order"])}
            yield arg, tuple(back[at] for at in range(len(axes)))
        else:
            yield arg, axes[len(axes) - len(arg.shape) :]


def _split(form: Form) -> tuple[frozenset, int]:
    """A sum without its number, to be compared with others; and the number."""
    terms = {(vs, ids, f) for vs, cs in form.items() for ids, f in cs.items() if f and (vs or ids)}
    return frozenset(terms), form.get((), {}).get((), 0)

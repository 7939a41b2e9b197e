"""Values that hang on no block size: what a forward has in a row is the same with other blocks.

    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    for start in range(0, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)

Lanes may be used only together with the program or the step that makes a position of them; then a value is a
function of positions, whatever blocks they come in. A loop over blocks may only sum, or take the greatest or
least, of what is neutral wherever a mask does not hold, and has to reach wherever it may hold: where it ends
beyond that makes no difference then. What is not of this form counts as hanging on its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from ...source import words
from ..ir.graph import Graph
from ..ir.kinds import LANEWISE
from ..ir.nodes import For, Node, Region, beneath, nodes_in
from ..ir.simplify import is_number
from ..ir.values import is_static
from .affine import Affine, Form, Monomial, Var, _combine, nonzero, times
from .masks import conjuncts

SUMS = words("add sub mul neg cast broadcast expand iv pid arange")
PLACEWISE = LANEWISE | words(
    "pow floordiv mod cdiv clamp select compare and or xor not land lor shl shr invert random"
)
NEUTRAL = {"add": ("sum", 0.0), "maximum": ("max", -float("inf")), "minimum": ("min", float("inf"))}
PLAIN = ("plain", None)  # lanes of a block whose size does not vary
SUMMED = -1  # the axis that a product sums over, which its result does not have
FLAGS = 4  # that are known when a kernel is compiled, at most

Label = tuple[str, Any] | None  # along an axis: the same everywhere, plain lanes, rows or columns
Labels = tuple[Label, ...]
Killers = dict[tuple[int, tuple[int, ...]], tuple[Node, tuple[int, ...]]]


class Hangs(Exception):
    """A value that may change with the blocks, and why."""


class Blocks:
    """What hangs on the constexprs `varied`; `rows`: grid axes whose programs share a range out, by axis,
    with the name of the block that each takes of it. Programs of other axes are the same with any blocks."""

    def __init__(self, g: Graph, varied: Iterable[str], rows: dict[int, str]) -> None:
        self.g, self.varied, self.rows = g, frozenset(varied), rows
        self.affine = Affine(g)
        self.facts: dict[Node, bool] = {}
        self.regions: dict[int, Region] = {}  # of loops over columns
        self.memo: dict[Node, Labels] = {}
        self.assumed: dict[Node, Labels] = {}  # of the carries of loops that do not vary

    def row_of(self, node: Node) -> int | None:
        """The axis whose rows a block of one axis has, where it hangs on rows alone; None for a number or a
        plain block. Raises Hangs."""
        if len(node.shape) > 1:
            raise Hangs("a block of two axes")
        found = {label[1] if label is not None else None for (label,) in self.every([node])}
        if len(found) != 1:
            raise Hangs("rows by a flag")
        return found.pop()

    def every(self, nodes: list[Node], bounded: bool = False) -> list[tuple[Label, ...]]:
        """The labels of some values, one axis after another, for all answers to what is known when a kernel
        is compiled. Raises Hangs where one is something else than a function of rows and plain lanes.
        `bounded`: also where what is loaded for them hangs on blocks for staying inside of its tensor."""
        found = []
        for _ in self.answers(nodes):
            for node in nodes:
                labels = self.labels(node)
                for label, size in zip(labels, node.shape, strict=True):
                    if label is None or label == PLAIN:
                        if self.hangs(size) and len(node.shape) == 1:
                            raise Hangs("a block of a size that varies")
                    elif label[0] != "row":
                        raise Hangs("lanes that are no rows")
                found.append(tuple(None if label == PLAIN else label for label in labels) or (None,))
            for load in (n for n in nodes_in(nodes) if n.op == "load" and bounded):
                self._bounded(load)
        return found

    def joined(self, stores: Iterable[tuple[Node | None, ...]]) -> None:
        """Raises Hangs where lanes of an address, a mask and a value that is stored are not of one kind."""
        parts = [[n for n in store if n is not None] for store in stores]
        for _ in self.answers([n for nodes in parts for n in nodes]):
            for nodes in parts:
                self._joined(max(nodes, key=lambda n: len(n.shape)), nodes)

    def answers(self, nodes: list[Node]) -> Iterator[None]:
        """Each answer to what is known when a kernel is compiled."""
        flags = [n.args[0] for n in nodes_in(nodes) if n.op == "ifout" and is_static(n.args[0])]
        flags = list(dict.fromkeys(flags))
        if len(flags) > FLAGS:
            raise Hangs("too many flags")
        for answers in product((False, True), repeat=len(flags)):
            self.facts, self.memo, self.assumed = dict(zip(flags, answers, strict=True)), {}, {}
            yield

    def lengths(self, accesses: list[tuple[Node, Node | None]]) -> dict[int, set[str]]:
        """For each axis of rows the arguments below which every access, an offset and its mask, is masked to
        lie. Raises Hangs."""
        found: dict[int, set[str]] = {}
        for _ in self.answers([n for access in accesses for n in access if n is not None]):
            for offset, mask in accesses:
                below: dict[int, set[str]] = {}
                for cond, _axes in conjuncts(mask, len(offset.shape)):
                    for axis, name in self._row_below(cond):
                        below.setdefault(axis, set()).add(name)
                for axis in {label[1] for label in self.labels(offset) if label and label[0] == "row"}:
                    names = below.get(axis, set())
                    found[axis] = found.get(axis, names) & names
        return found

    def within(self, accesses: list[tuple[Node, Node | None]], lengths: dict[int, Node]) -> bool:
        """Whether every access, an offset and its mask, is masked to lie within as many rows of an axis as
        `lengths` says, wherever the first of them is."""
        for _ in self.answers([n for access in accesses for n in access if n is not None]):
            for offset, mask in accesses:
                bounded = {
                    axis
                    for cond, _ in conjuncts(mask, len(offset.shape))
                    for axis in self._ends_at(cond, lengths)
                }
                if {label[1] for label in self.labels(offset) if label and label[0] == "row"} - bounded:
                    return False
        return True

    def _ends_at(self, cond: Node, lengths: dict[int, Node]) -> Iterator[int]:
        """`first + row < first + length`, of the rows of an axis."""
        if cond.op != "compare" or cond.attrs["cmp"] != "<" or cond.args[0].is_float:
            return
        rank = len(cond.shape)
        rows, end = (self.affine.terms(a, tuple(range(rank - len(a.shape), rank))) for a in cond.args)
        for label in self.labels(cond.args[0]):
            if label is None or label[0] != "row" or label[1] not in lengths:
                continue
            rest = nonzero(_combine(_combine(rows, end, -1), self.affine.terms(lengths[label[1]], ()), 1))
            lanes = [key for key in rest if len(key) == 1 and key[0].kind == "lane"]
            plain = len(rest) == 2 and len(lanes) == 1 and rest[lanes[0]] == {(): 1}
            if plain and self._partner(rest, lanes[0][0])[1] == label:
                yield label[1]

    def _row_below(self, cond: Node) -> Iterator[tuple[int, str]]:
        """`rows < n`, of the rows of an axis as they are."""
        if cond.op != "compare" or cond.attrs["cmp"] != "<" or cond.args[0].is_float:
            return
        rows, length = cond.args[0], beneath(cond.args[1], "broadcast", "expand", "cast")
        if length.op not in ("param", "constexpr") or self.hangs(length):
            return
        form = nonzero(self.affine.terms(rows, tuple(range(len(rows.shape)))))
        lanes = [key for key in form if len(key) == 1 and key[0].kind == "lane"]
        labels = [label for label in self.labels(rows) if label is not None and label[0] == "row"]
        if len(form) == 2 and len(lanes) == len(labels) == 1 and form[lanes[0]] == {(): 1}:
            yield labels[0][1], length.attrs["name"]

    def _bounded(self, load: Node) -> None:
        """Raises Hangs where a block of columns may be read beyond the last that some block has."""
        for label in self.labels(load):
            if label is None or label[0] != "col":
                continue
            region, masks = self.regions[label[1]], load.args[2:3]
            low, high, step = region.bounds  # type: ignore[misc]
            ends = [e.args[0] if e.op == "cdiv" else e for e in self._ends(high)]
            ends = [e for end in ends for e in self._ends(end) if self.affine.uniform(e)]
            if step.op == "const":
                step = self._ends(high)[0].args[-1]
            known = {k: v for m in masks for k, v in self.conditions(m, tuple(range(len(m.shape)))).items()}
            if not any(
                self._below(n, axes, region, low, step, e) for n, axes in known.values() for e in ends
            ):
                raise Hangs("columns that are read without a mask")

    # what varies

    def hangs(self, node: Node) -> bool:
        """Whether a value that is the same in all programs varies with the blocks."""
        return any(
            n.op == "constexpr" and n.attrs["name"] in self.varied
            or n.op == "npid" and n.attrs["axis"] in self.rows
            for n in nodes_in([node])
        )  # fmt: skip

    def region_hangs(self, region: Region) -> bool:
        bounds = region.bounds or ()
        rowwise = any(n.op == "pid" and n.attrs["axis"] in self.rows for n in nodes_in(bounds))
        return rowwise or any(map(self.hangs, bounds))

    # labels

    def labels(self, node: Node) -> Labels:
        """What the lanes of each axis are. Raises Hangs."""
        if node in self.assumed:
            return self.assumed[node]
        if node not in self.memo:
            self.memo[node] = self._labels(node)
        return self.memo[node]

    def _labels(self, node: Node) -> Labels:
        op, args = node.op, node.args
        nothing: Labels = (None,) * len(node.shape)
        if op in ("const", "constexpr", "param", "npid", "isnone"):
            if self.hangs(node):
                raise Hangs(f"`{node.attrs.get('name')}` is used as a number")
            return nothing
        if op in SUMS and not node.is_float and not (op == "cast" and args[0].is_float):
            return self._sum(node)
        if op == "full":
            return (*self.labels(args[0]), *nothing)
        if op == "load":
            if args[0].op != "param" or node.attrs.get("upstream") or node.attrs.get("buffer"):
                raise Hangs("what is loaded is not the forward's")
            return self._joined(node, args[1:])
        if op == "expand":
            inner, at = self.labels(args[0]), node.attrs["axis"]
            return (*inner[:at], None, *inner[at:])
        if op == "permute":
            inner = self.labels(args[0])
            return tuple(inner[axis] for axis in node.attrs["order"])
        if op == "compare" and not any(arg.is_float for arg in args):
            return self._compared(node)
        if op in PLACEWISE:
            return self._joined(node, args)
        if op == "reduce":
            return self._reduced(node)
        if op == "dot":
            return self._product(node)
        if op == "ifout":
            return self._chosen(node)
        if op == "loopout":
            return self._carried(node.attrs["loop"], node.attrs["index"])
        if op in ("phi", "user", "entry"):
            raise Hangs(f"{op} in line {node.line}")
        inner = tuple(label for arg in args for label in self.labels(arg))
        sizes = [dim for one in (node, *args) for dim in one.shape]
        if any(label not in (None, PLAIN) for label in inner) or any(map(self.hangs, sizes)):
            raise Hangs(f"{op} mixes lanes")
        return (PLAIN,) * len(node.shape)

    def _joined(self, node: Node, args: Iterable[Node]) -> Labels:
        """Of an operation that is done for each place apart."""
        out: list[Label] = [None] * len(node.shape)
        for arg in args:
            labels = self.labels(arg)
            for axis, label in enumerate(labels, len(out) - len(labels)):
                out[axis] = self._same(out[axis], label)
        return tuple(out)

    def _same(self, one: Label, other: Label) -> Label:
        if one is not None and other is not None and one != other:
            raise Hangs("lanes of two kinds meet")
        return one if other is None else other

    def _chosen(self, node: Node) -> Labels:
        cond, sides = node.args[0], [node.attrs["then"], node.attrs["other"]]
        if is_static(cond):
            if self.hangs(cond):
                raise Hangs("a branch that the blocks decide")
            side = sides[not self.facts[cond]]
            if side is None:
                raise Hangs("a value of one branch")
            return self.labels(side)
        if None in sides:
            raise Hangs("a value of one branch")
        return self._joined(node, [cond, *sides])

    # positions

    def _compared(self, node: Node) -> Labels:
        """Of integers: lanes may be on one side and their step on the other, as in i < n - step * BLOCK."""
        rank = len(node.shape)
        one, other = (self.affine.terms(a, tuple(range(rank - len(a.shape), rank))) for a in node.args)
        return self._positions(nonzero(_combine(one, other, -1)), rank)

    def _sum(self, node: Node) -> Labels:
        """Of an integer: lanes have to stand together with their program or step."""
        rank = len(node.shape)
        return self._positions(nonzero(self.affine.terms(node, tuple(range(rank)))), rank)

    def _positions(self, form: Form, rank: int) -> Labels:
        out: list[Label] = [None] * rank
        for var in [key[0] for key in form if len(key) == 1 and key[0] and self._block(key[0])]:
            partner, label = self._partner(form, var)
            del form[var,], form[partner,]
            out[var.key[0]] = self._same(out[var.key[0]], label)
        for variables, coefficients in form.items():
            if any(self.hangs(self.affine.nodes[i]) for ids in coefficients for i in ids):
                raise Hangs("a position that is a multiple of a block")
            for var in variables:
                self._single(var, out)
        return tuple(out)

    def _block(self, var: Var) -> bool:
        return var.kind == "lane" and var.node is not None and self.hangs(var.node.args[1])

    def _partner(self, form: Form, lane: Var) -> tuple[Var, Label]:
        """The program or the step that a lane of a block makes a position with."""
        assert lane.node is not None
        low, size = lane.node.args
        sizes = self.affine.monomials(size)
        if low.op != "const" or low.value != 0 or len(sizes) != 1 or size.op != "constexpr":
            raise Hangs("lanes that do not start at zero")
        wanted = _scaled(form[lane,], sizes[0])
        for key, coefficients in form.items():
            if len(key) != 1 or coefficients != wanted:
                continue
            (var,) = key
            if var.kind == "pid" and self.rows.get(var.key[0]) == size.attrs["name"]:
                return var, ("row", var.key[0])
            if var.kind == "trip" and var.region is not None:
                self.regions[id(var.region)] = var.region
                return var, ("col", id(var.region))
        raise Hangs(f"lanes of `{size.attrs['name']}` without their place")

    def _single(self, var: Var, out: list[Label]) -> None:
        """A variable that stands for itself."""
        node = var.node
        if var.kind == "trip":
            assert var.region is not None
            if self.region_hangs(var.region):
                raise Hangs("a step of a loop over blocks")
        elif var.kind == "pid":
            if var.key[0] in self.rows:
                raise Hangs("the number of a program")
        elif var.kind == "lane" and not self._block(var):
            out[var.key[0]] = self._same(out[var.key[0]], PLAIN)
        elif node is None or var.kind in ("lane", "vpid"):
            raise Hangs("lanes without their place")
        else:
            for axis, label in zip(var.key[1], self.labels(node), strict=True):
                out[axis] = self._same(out[axis], label)

    # sums

    def _whole(self, node: Node, axis: int) -> Labels:
        """The labels of what is summed over an axis of a fixed size."""
        labels = self.labels(node)
        if labels[axis] not in (None, PLAIN) or self.hangs(node.shape[axis]):
            raise Hangs("a sum over a block")
        return labels

    def _reduced(self, node: Node) -> Labels:
        (value,), axis = node.args, node.attrs["axis"]
        inner = beneath(value, "cast")
        if inner.op == "loopout":
            loop, carry = inner.attrs["loop"], inner.attrs["loop"].carries[inner.attrs["index"]]
            if self.region_hangs(loop.region) and self.hangs(value.shape[axis]):
                return self._spread(loop, carry, axis, node.attrs["fn"])
        labels = self._whole(value, axis)
        return (*labels[:axis], *labels[axis + 1 :])

    def _spread(self, loop: For, carry: Any, axis: int, fn: str) -> Labels:
        """What a loop adds up lane by lane, and is summed over its lanes after it."""
        init, more = beneath(carry.init, "full", "broadcast"), self._added(carry)
        if fn != "sum" or carry.next.op != "add" or init.op != "const" or init.value != 0:
            raise Hangs("a block that a loop leaves")
        labels = self.labels(more)
        self._neutral(more, axis, loop.region, labels[axis], 0.0)
        return self._without(labels, axis, loop.region)

    def _product(self, node: Node) -> Labels:
        a, b, *rest = node.args
        one, other = self._whole(a, len(a.shape) - 1), self._whole(b, len(b.shape) - 2)
        return self._dotted(node, one, other, rest)

    def _dotted(self, node: Node, one: Labels, other: Labels, rest: list[Node]) -> Labels:
        out: Labels = (*one[:-2], one[-2], other[-1])
        for acc in rest:
            out = tuple(map(self._same, out, self.labels(acc)))
        return out

    def _added(self, carry: Any) -> Node:
        """What each step adds to a carry, or compares with it."""
        following, phi = carry.next, carry.phi
        if following is None or following.op not in NEUTRAL or phi not in following.args:
            raise Hangs("a loop that does not just sum")
        if following.args[0] is following.args[1]:
            raise Hangs("a loop that doubles")
        (more,) = [arg for arg in following.args if arg is not phi]
        return more

    def _carried(self, loop: For, index: int) -> Labels:
        """What a loop leaves in a carry."""
        if loop.cond is not None:
            raise Hangs("a while loop")
        if not self.region_hangs(loop.region):
            return self._steady(loop, index)
        carry = loop.carries[index]
        more, region = self._added(carry), loop.region
        fn, neutral = NEUTRAL[carry.next.op]  # type: ignore[union-attr]
        if more.op == "reduce" and more.attrs["fn"] == fn:
            (value,), axis = more.args, more.attrs["axis"]
            labels = self.labels(value)
            self._neutral(value, axis, region, labels[axis], neutral)
            out = self._without(labels, axis, region)
        elif more.op == "dot" and fn == "sum" and len(more.args) == 2:
            a, b = more.args
            one, other = self.labels(a), self.labels(b)
            if one[-1] != other[-2]:
                raise Hangs("a product over lanes of two kinds")
            rank = len(a.shape)
            killers = {**self.killers(a, tuple(range(rank)), 0.0)}
            killers |= self.killers(b, (*range(rank - 2), rank - 1, rank), 0.0)
            self._reaches(region, one[-1], killers)
            out = self._without((*one, *other[-1:]), rank - 1, region)
        else:
            raise Hangs("a loop that adds up no block")
        return tuple(map(self._same, out, self.labels(carry.init)))

    def _without(self, labels: Labels, axis: int, region: Region) -> Labels:
        out = (*labels[:axis], *labels[axis + 1 :])
        if any(label == ("col", id(region)) for label in out):
            raise Hangs("columns twice")
        return out

    def _steady(self, loop: For, index: int) -> Labels:
        """A loop whose steps are the same with any blocks: what it carries, it may carry in every place."""
        known = dict(self.assumed)
        self.assumed |= {carry.phi: self.labels(carry.init) for carry in loop.carries}
        for _ in range(1 + sum(len(carry.phi.shape) for carry in loop.carries)):  # each finds an axis's lanes
            found = {}
            for carry in loop.carries:
                self.memo = {}
                before = self.assumed[carry.phi]
                found[carry.phi] = tuple(map(self._same, before, self.labels(carry.next)))  # type: ignore[arg-type]
            same = all(found[phi] == self.assumed[phi] for phi in found)
            self.assumed |= found
            if same:
                break
        else:
            raise Hangs("what a loop carries")
        out = self.assumed[loop.carries[index].phi]
        self.assumed, self.memo = known, {}
        return out

    # masks

    def _neutral(self, value: Node, axis: int, region: Region, label: Label, neutral: float) -> None:
        self._reaches(region, label, self.killers(value, tuple(range(len(value.shape))), neutral))

    def _reaches(self, region: Region, label: Label, killers: Killers) -> None:
        """Whether a loop over blocks reaches every column for which all of some conditions hold."""
        if label != ("col", id(region)) or region.bounds is None:
            raise Hangs("a sum over what is no column of its loop")
        low, high, step = region.bounds
        if self.hangs(low) or any(n.op == "pid" and n.attrs["axis"] in self.rows for n in nodes_in([low])):
            raise Hangs("a loop that starts by its blocks")
        counted = step.op == "const" and step.value == 1  # blocks, not columns
        if counted and not (low.op == "const" and low.value == 0):
            raise Hangs("a loop that starts by its blocks")
        for end in self._ends(high):
            if counted:
                if end.op != "cdiv":
                    raise Hangs("where a loop over blocks ends")
                step, end = end.args[1], end.args[0]
            ends = [end] if not counted else self._ends(end)
            for one in ends:
                if not any(
                    self._below(node, axes, region, low, step, one) for node, axes in killers.values()
                ):
                    raise Hangs("a mask may hold beyond where its loop ends")

    def _ends(self, node: Node) -> list[Node]:
        if node.op == "minimum":
            return [end for arg in node.args for end in self._ends(arg)]
        if node.op == "ifout" and node.args[0] in self.facts:
            side = node.attrs["then" if self.facts[node.args[0]] else "other"]
            return [node] if side is None else self._ends(side)
        return [node]

    def _below(
        self, node: Node, axes: tuple[int, ...], region: Region, low: Node, step: Node, end: Node
    ) -> bool:
        """Whether a comparison holds for no column from `end` on."""
        left, right = (self.affine.terms(a, axes[len(axes) - len(a.shape) :]) for a in node.args)
        cmp = node.attrs["cmp"]
        if cmp in (">", ">="):
            left, right, cmp = right, left, {">": "<", ">=": "<="}[cmp]
        if cmp not in ("<", "<="):
            return False
        moved = {
            key: number
            for key, number in right.items()
            if len(key) == 1 and key[0] is not None and key[0].kind == "trip" and key[0].region is region
        }
        left, right = (_combine(side, moved, -1) for side in (left, right))
        columns = nonzero(_combine(left, self.affine.terms(low, ()), -1))
        lanes = [key[0] for key in columns if key and key[0] is not None and key[0].kind == "lane"]
        trips = [key[0] for key in columns if key and key[0] is not None and key[0].kind == "trip"]
        if len(columns) != 2 or len(lanes) != 1 or len(trips) != 1 or trips[0].region is not region:
            return False
        sizes = self.affine.monomials(step)
        strides = {ids: factor for factor, ids in sizes}
        if (
            columns[lanes[0],] != {(): 1}
            or columns[trips[0],] != strides
            or lanes[0].node.args[1] is not step
        ):  # type: ignore[union-attr]
            return False
        rest = nonzero(_combine(self.affine.terms(end, ()), right, -1))
        return self._at_least(rest, 0 if cmp == "<" else 1)

    def _at_least(self, form: Form, least: int) -> bool:
        """Whether a sum is no less than a number: a constant, or what a block has beside one of its lanes."""
        rows = [key[0] for key in form if len(key) == 1 and key[0] is not None]
        number = {**form.get((), {})}
        if len(rows) == 1 and len(form) == 2 and rows[0].kind == "lane" and form[rows[0],] == {(): -1}:
            ((factor, ids),) = self.affine.monomials(rows[0].node.args[1]) or [(0, ())]  # type: ignore[union-attr]
            if factor and number.get(ids) == factor:
                del number[ids]
                least -= 1
                form = {(): number}
        known = not set(form) - {()} and not set(number) - {()}
        return known and number.get((), 0) >= least

    def killers(self, node: Node, axes: tuple[int, ...], value: float) -> Killers:
        """The comparisons without which a value is `value`: 0, or an infinity."""
        found = self._killed(node, axes, value)
        return {} if found is None else found

    def _killed(self, node: Node, axes: tuple[int, ...], value: float) -> Killers | None:
        """As above; None where it is `value` in any case."""
        op, args = node.op, node.args

        def of(arg: Node, wanted: float = value) -> Killers | None:
            return self._killed(arg, axes[len(axes) - len(arg.shape) :], wanted)

        def either(*found: Killers | None) -> Killers | None:
            return None if None in found else {k: v for one in found if one for k, v in one.items()}

        def both(one: Killers | None, other: Killers | None) -> Killers | None:
            if one is None or other is None:
                return other if one is None else one
            return {k: v for k, v in one.items() if k in other}

        if op == "const":
            return None if node.value == value else {}
        if op in ("full", "broadcast", "cast"):
            return of(args[0])
        if op == "neg":
            return of(args[0], -value)
        if op == "expand":
            at = node.attrs["axis"]
            return self._killed(args[0], (*axes[:at], *axes[at + 1 :]), value)
        if op == "permute":
            back = {axis: axes[at] for at, axis in enumerate(node.attrs["order"])}
            return self._killed(args[0], tuple(back[at] for at in range(len(axes))), value)
        if op == "where":
            cond, one, other = args
            if of(other) is None:
                return either(of(one), self.conditions(cond, axes[len(axes) - len(cond.shape) :]))
            return both(of(one), of(other))
        if op == "load" and len(args) == 4 and of(args[3]) is None:
            return self.conditions(args[2], axes[len(axes) - len(args[2].shape) :])
        if op == "ifout" and args[0] in self.facts:
            side = node.attrs["then" if self.facts[args[0]] else "other"]
            return {} if side is None else of(side)
        if op == "call" and node.attrs["fn"] in ("exp", "exp2") and value == 0:
            return of(args[0], -float("inf"))
        if op == "mul" and value == 0:
            return either(*map(of, args))
        if op == "div" and value == 0:
            return of(args[0])
        if op == "dot" and value == 0 and len(args) == 2:
            rows, columns = (*axes[:-1], SUMMED), (*axes[:-2], SUMMED, axes[-1])
            found = (self._killed(arg, at, 0.0) for arg, at in zip(args, (rows, columns), strict=True))
            return either(*map(_of_all, found))
        if op in ("add", "sub"):
            two = of(args[0]), of(args[1], value if op == "add" or value == 0 else -value)
            return both(*two) if value == 0 else either(*two)
        return {}

    def conditions(self, cond: Node, axes: tuple[int, ...]) -> Killers:
        """The comparisons that hold wherever a condition does."""
        op, args = cond.op, cond.args
        if op in ("and", "land", "broadcast"):
            parts = (self.conditions(a, axes[len(axes) - len(a.shape) :]) for a in args)
            return {k: v for one in parts for k, v in one.items()}
        if op == "expand":
            at = cond.attrs["axis"]
            return self.conditions(args[0], (*axes[:at], *axes[at + 1 :]))
        if op == "ifout" and args[0] in self.facts:
            side = cond.attrs["then" if self.facts[args[0]] else "other"]
            return {} if side is None else self.conditions(side, axes)
        return {(cond.id, axes): (cond, axes)} if op == "compare" else {}


def _of_all(found: Killers | None) -> Killers | None:
    """Of the comparisons without which a factor is zero, those that leave all that is summed zero."""
    if found is None:
        return None

    def alone(node: Node, axes: tuple[int, ...]) -> bool:
        return all(is_number(node.shape[at], 1) for at, axis in enumerate(axes) if axis == SUMMED)

    return {key: condition for key, condition in found.items() if alone(*condition)}


def _scaled(coefficients: dict[tuple[int, ...], int], by: Monomial) -> dict[tuple[int, ...], int]:
    out = {}
    for ids, factor in coefficients.items():
        product_factor, product_ids = times((factor, ids), by)
        out[product_ids] = product_factor
    return out

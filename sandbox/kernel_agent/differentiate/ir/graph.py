"""The graph: makes nodes, shares equal ones, finds the region that each belongs to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ...source import words
from . import simplify
from .folding import concrete
from .kinds import ARITHMETIC, DETACHED, STRETCHING
from .nodes import FLOATS, HALF, INTS, If, Node, Region, is_float, real
from .refusal import Refusal


class Graph:
    """Makes nodes: simplifies, shares equal ones, finds their home."""

    def __init__(self) -> None:
        self.top = Region("top", None)
        self.here = self.top
        self.table: dict[tuple, Node] = {}
        self.regions: dict[tuple, Region] = {}
        self.count = 0
        self.reverse = False
        self.sized: frozenset[str] = frozenset()  # constexprs that follow the sizes of a call
        self.strides: frozenset[str] = frozenset()  # parameters that are a tensor's strides
        self.others: Callable[[], Iterable[Any]] = tuple  # launches that calls with other sizes make here
        # Conditions of which one branch was left out, as the traced call has them; with the line.
        self.folded: dict[Node, tuple[bool, int]] = {}
        # The lines of branches that could be left out, by the line of their `if`.
        self.untaken: dict[int, range] = {}
        self.places: list[Node] = []  # the addresses that the forward stores to
        self.elsewhere = False  # of calls that give other answers than the traced one
        self.answers: dict[Node, bool] = {}  # to the conditions that such calls are known by
        self.example: dict[int, Any] = {}  # values of one of them, by the ids of their nodes
        # What combine functions make of two operands; by function, type and shape, and by its number.
        self.combined: dict[Any, tuple[list[Node], list[Node], list[Node]]] = {}
        # Values that may be infinite where outputs are not, of which the reverse sweep is told.
        self.saturated: set[Node] = set()
        self.contracted: set[Node] = set()  # extents that the forward's own dot products sum over
        self.met: list[tuple[Node, Node]] = []  # sizes with other names that have to be equal
        self.line: int | None = None
        self.one = self.const(1)

    # regions

    @contextmanager
    def at(self, region: Region) -> Iterator[None]:
        """Inside, nodes are made for this region."""
        here, self.here = self.here, region
        try:
            yield
        finally:
            self.here = here

    def loop_region(self, lo: Node, hi: Node, step: Node, call: str, line: int | None) -> Region:
        key = ("for", id(self.here), lo.id, hi.id, step.id, call)
        if key not in self.regions:
            region = self.regions[key] = Region("for", self.here, key, line)
            region.bounds, region.call = (lo, hi, step), call
            dtype = "int64" if any(node.dtype == "int64" for node in region.bounds) else "int32"
            region.iv = self._new("iv", (), {"region": id(region)}, dtype, (), region)
        return self.regions[key]

    def while_region(self, line: int | None) -> Region:
        return Region("while", self.here, (), line)

    def fork(self, cond: Node, static: bool, line: int | None = None) -> If:
        """An `if` at this place, with empty branches."""
        then, other = self.branch(cond, True), self.branch(cond, False)
        return If(cond, then, other, outer=self.here, static=static, line=line)

    def branch(self, cond: Node, positive: bool) -> Region:
        key = ("if", id(self.here), cond.id, positive)
        if key not in self.regions:
            region = self.regions[key] = Region("then" if positive else "else", self.here, key)
            region.cond, region.positive = cond, positive
        return self.regions[key]

    # nodes

    def _new(self, op: str, args: tuple, attrs: dict, dtype: str, shape: tuple, home: Region) -> Node:
        self.count += 1
        node = Node(self.count, op, args, attrs, dtype, shape, home)
        node.line, node.reverse = self.line, self.reverse
        node.upstream = any(arg.upstream for arg in args)
        return node

    def const(self, value: Any, dtype: str | None = None, shape: tuple = ()) -> Node:
        if shape:
            assert dtype is not None
            return self.make("full", (self.const(value),), {}, dtype, shape)
        if dtype is None and isinstance(value, int) and not isinstance(value, bool):
            dtype = int_dtype(value)
        elif dtype is None:
            dtype = "int1" if isinstance(value, bool) else "float32"
        return self.intern("const", (), {"value": value, "repr": repr(value)}, dtype, ())

    def zeros(self, shape: tuple, dtype: str) -> Node:
        return self.const(0.0 if is_float(dtype) else 0, dtype, shape)

    def make(
        self,
        op: str,
        args: Iterable[Node],
        attrs: dict | None = None,
        dtype: str | None = None,
        shape: tuple | None = None,
    ) -> Node:
        args, attrs = tuple(args), attrs or {}
        if dtype is None:
            dtype = promote(args)
            if op == "div" and real(dtype) in HALF:  # no GPU divides those: Triton widens both sides
                dtype = "float32"
        if shape is None:
            shape = broadcast_shape(self, [arg.shape for arg in args])
        elif op in ELEMENTWISE or op == "load":
            for arg in args:
                self.meet(arg.shape, shape)
        if op in ELEMENTWISE and any(arg.op in STRETCHING for arg in args):
            args = self._unstretched(args, shape)
            if op in ARITHMETIC and all(not _core(arg).shape for arg in args):  # one number for all lanes
                number = self.make(op, [_core(arg) for arg in args], attrs, dtype, ())
                return self.broadcast(number, shape)
        simpler = simplify.node(self, op, args, attrs, dtype, shape)
        return simpler if simpler is not None else self.intern(op, args, attrs, dtype, shape)

    def _unstretched(self, args: tuple, shape: tuple) -> tuple:
        """Drop explicit broadcasts that another argument makes anyway."""
        out = list(args)
        for i, arg in enumerate(args):
            core = _core(arg)
            if core is arg and arg.op == "broadcast":
                core = arg.args[0]
            if core is not arg and any(other.shape == shape for j, other in enumerate(out) if j != i):
                out[i] = core
        return tuple(out)

    def intern(self, op: str, args: tuple, attrs: dict, dtype: str, shape: tuple) -> Node:
        deepest = self.top
        for arg in (*args, *shape):
            if arg.home.depth > deepest.depth:
                deepest = arg.home
        home = self.here if op not in ("const", "constexpr", "param", "pid", "npid") else self.top
        while home is not deepest:
            above = home.parent
            if not home.is_loop and not (home.skips and above is not None and deepest.depth < above.depth):
                break
            home = above  # type: ignore[assignment]
        key = (op, tuple(a.id for a in args), _freeze(attrs), dtype, tuple(d.id for d in shape))
        region: Region | None = home
        while region is not None:  # an equal node that is already available here
            found = self.table.get((key, id(region)))
            if found is not None:
                return found
            if region is deepest:
                break
            region = region.parent
        node = self._new(op, args, attrs, dtype, shape, home)
        detached = op in DETACHED or attrs.get("steps")
        node.active = node.is_float and not detached and any(arg.active for arg in args)
        self.table[(key, id(home))] = node
        return node

    def fresh(self, op: str, attrs: dict, dtype: str, shape: tuple, home: Region, args: tuple = ()) -> Node:
        """A node that equals no other: a loop carry, the result of a loop or of an `if`."""
        return self._new(op, args, attrs, dtype, shape, home)

    def twin(self, node: Node, home: Region) -> Node:
        """Another carry that is like a given one."""
        new = self.fresh(node.op, node.attrs, node.dtype, node.shape, home)
        new.active, new.hint, new.line = node.active, node.hint, node.line
        new.upstream, new.reverse = node.upstream, node.reverse
        return new

    def adjoint_carry(self, hint: str, like: Node, home: Region) -> Node:
        """A carry of a loop of the backward, of the type and shape of a value."""
        new = self.fresh("phi", {"name": hint}, like.dtype, like.shape, home)
        new.hint, new.upstream, new.reverse = hint, True, True
        return new

    def merged(self, stmt: If, then: Node | None, other: Node | None, like: Node, home: Region) -> Node:
        """A result of an `if`, named and typed like a value or a result of another `if`."""
        attrs = {**(like.attrs if like.op == "ifout" else {}), "then": then, "other": other, "if": stmt}
        out = self.fresh("ifout", attrs, like.dtype, like.shape, home, (stmt.cond,))
        out.active, out.hint, out.upstream, out.line = like.active, like.hint, like.upstream, like.line
        stmt.outs.append(out)
        return out

    def pid(self, axis: int) -> Node:
        return self.intern("pid", (), {"axis": axis}, "int32", ())

    def npid(self, axis: int) -> Node:
        return self.intern("npid", (), {"axis": axis}, "int32", ())

    def param(self, name: str) -> Node:
        """An integer that a generated kernel gets beside the forward's parameters."""
        return self.intern("param", (), {"name": name}, "int32", ())

    def scratch(self, name: str, dtype: str) -> Node:
        """The pointer to a buffer that the host allocates."""
        return self.intern("param", (), {"name": name, "none": False, "elem": dtype}, "pointer", ())

    # shorthands for the rules

    def add(self, a: Node, b: Node) -> Node:
        return self.make("add", (a, b))

    def sub(self, a: Node, b: Node) -> Node:
        return self.make("sub", (a, b))

    def mul(self, a: Node, b: Node) -> Node:
        return self.make("mul", (a, b))

    def div(self, a: Node, b: Node) -> Node:
        return self.make("div", (a, b))

    def neg(self, a: Node) -> Node:
        return self.make("neg", (a,))

    def signed(self, total: Node | None, term: Node, sign: int) -> Node:
        """A sum with one more term, added or taken away."""
        if total is None:
            return term if sign > 0 else self.neg(term)
        return self.add(total, term) if sign > 0 else self.sub(total, term)

    def number(self, value: float) -> Node:
        return self.const(float(value))

    def where(self, cond: Node, a: Node, b: Node) -> Node:
        return self.make("where", (cond, a, b), dtype=promote((a, b)))

    def call(self, name: str, *args: Node) -> Node:
        return self.make("call", args, {"fn": name})

    def compare(self, cmp: str, a: Node, b: Node) -> Node:
        return self.make("compare", (a, b), {"cmp": cmp}, "int1")

    def both(self, a: Node | None, b: Node) -> Node:
        """Where two conditions hold; no condition holds everywhere."""
        return b if a is None else self.make("and", (a, b), {}, "int1")

    def cast(self, a: Node, dtype: str) -> Node:
        return self.make("cast", (a,), {"to": dtype}, dtype, a.shape)

    def again(self, node: Node, args: list[Node], upstream: bool = True) -> Node:
        """The same operation on other arguments, from the same line; `upstream`: on one if `node` does."""
        reverse, self.reverse = self.reverse, node.reverse
        line, self.line = self.line, node.line
        new = self.make(node.op, args, node.attrs, node.dtype, node.shape)
        self.reverse, self.line = reverse, line
        if new.op == "load":
            new.active, new.upstream = node.active, node.upstream
        new.upstream = new.upstream or (upstream and node.upstream)
        return new

    def product(self, factors: Iterable[Node]) -> Node:
        """Of sizes: how many elements a block of these extents has, say."""
        return functools.reduce(self.mul, factors, self.one)

    def lane(self, count: Node, axis: int, rank: int) -> Node:
        """0 to `count` along one axis of a block with `rank` axes, of length 1 along the others."""
        return self.along(self.make("arange", (self.const(0), count), {}, "int32", (count,)), axis, rank)

    def along(self, a: Node, axis: int, rank: int) -> Node:
        """A block of one axis as a block with `rank` axes, of length 1 along the others."""
        for other in range(rank):
            if other != axis:
                a = self.expand(a, other)
        return a

    def lanes(self, shape: tuple, axis: int) -> Node:
        """What one axis adds to the row-major number of an element of a block."""
        lane = self.lane(shape[axis], axis, len(shape))
        for dim in shape[axis + 1 :]:
            lane = self.mul(lane, dim)
        return lane

    def expand(self, a: Node, axis: int) -> Node:
        shape = (*a.shape[:axis], self.one, *a.shape[axis:])
        return self.make("expand", (a,), {"axis": axis}, a.dtype, shape)

    def broadcast(self, a: Node, shape: tuple) -> Node:
        self.meet(a.shape, shape)
        return self.make("broadcast", (a,), {}, a.dtype, shape)

    def reduce(self, fn: str, a: Node, axis: int, keep: bool = False, dtype: str | None = None) -> Node:
        shape = (*a.shape[:axis], *a.shape[axis + 1 :])
        node = self.make("reduce", (a,), {"fn": fn, "axis": axis}, dtype or a.dtype, shape)
        return self.expand(node, axis) if keep else node

    def meet(self, shape: tuple, other: tuple) -> None:
        """Blocks of two shapes are used together: sizes of an axis have to be equal, if none is stretched."""
        for one, two in zip(reversed(shape), reversed(other), strict=False):
            if one is not two and not self.is_one(one) and not self.is_one(two):
                self.met.append((one, two))

    # facts

    def launched(self, grid: tuple[int, ...]) -> dict[int, Any]:
        """The counts of programs of the traced launch, for `concrete`."""
        return {self.npid(axis).id: count for axis, count in enumerate(grid)} | self.example

    def example_of(self, args: dict[str, Any], grid: tuple[int, ...]) -> dict[int, Any]:
        """What a launch passes, by the ids of nodes."""
        found: dict[int, Any] = {self.npid(axis).id: count for axis, count in enumerate(grid)}
        for node in self.table.values():
            name = (node.args[0] if node.op == "isnone" else node).attrs.get("name")
            if node.op in ("param", "constexpr", "isnone") and name in args:
                value = getattr(args[name], "value", args[name])
                found[node.id] = value is None if node.op == "isnone" else value
        return {i: v for i, v in found.items() if v is None or isinstance(v, (int, float, str, bool))}

    def takes(self, args: dict[str, Any], grid: tuple[int, ...]) -> bool:
        """Take a launch for an example of the calls that this graph is of, if it is one."""
        self.example = {}
        found = self.example_of(args, grid)
        known = all(self.concrete(node, found) is not None for node in self.answers)
        if known and all(bool(self.concrete(node, found)) is answer for node, answer in self.answers.items()):
            self.example = found
        return bool(self.example)

    def concrete(self, node: Node, known: dict[int, Any] | None = None) -> Any:
        """The value of a constexpr or of a parameter in the traced call, None where it is not known before
        the launch.

        `known`: values of further nodes, by their ids.
        """
        return concrete(node, self.example | (known or {}))

    def elements(self, shape: Iterable[Node], grid: tuple[int, ...] = ()) -> int:
        """How many elements a block has in the traced call, which has this grid; what is not known counts
        as 1."""
        known = self.launched(grid)
        return math.prod(int(self.concrete(dim, known) or 1) for dim in shape)

    def is_one(self, dim: Node) -> bool:
        return dim.op == "const" and dim.value == 1


ELEMENTWISE = ARITHMETIC | words("clamp maximum minimum where compare and or")


def _core(node: Node) -> Node:
    """The number that fills all lanes of a block; the node itself where there is none."""
    core = node
    while core.op in STRETCHING and core.args:
        core = core.args[0]
    return node if core.shape else core


def _freeze(attrs: dict) -> tuple:
    return tuple(
        sorted(
            (k, v if isinstance(v, (int, str, bool, tuple)) or v is None else repr(v))
            for k, v in attrs.items()
        )
    )


def broadcast_shape(g: Graph, shapes: list[tuple]) -> tuple:
    """numpy's rule over symbolic dimensions: only a literal 1 is stretched."""
    rank = max((len(s) for s in shapes), default=0)
    out = [g.one] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            have = out[axis]
            if g.is_one(dim) or dim is have:
                continue
            if not g.is_one(have) and g.concrete(have) != g.concrete(dim):
                raise Refusal(
                    "broadcast", f"blocks of {g.concrete(have)} and {g.concrete(dim)} do not combine"
                )
            g.meet((have,), (dim,))
            if have.op == "const":  # the name rather than the number
                out[axis] = dim
    return tuple(out)


def int_dtype(value: int) -> str:
    """The type that Triton gives a Python number."""
    return "int32" if -(2**31) <= value < 2**31 else "int64"


def promote(args: Iterable[Node]) -> str:
    """Triton's type of an arithmetic result."""
    args = list(args)
    strong = [a.dtype for a in args if not a.weak]
    weak = [a.dtype for a in args if a.weak]
    if not strong:
        return "float32" if any(is_float(d) for d in weak) else max(weak, key=INTS.index, default="int32")
    floats = [d for d in strong if is_float(d)]
    if floats:
        if {real(d) for d in floats} == {"float16", "bfloat16"}:
            return "float32"
        return max(floats, key=lambda d: (FLOATS.index(real(d)), not d.startswith("$")))
    if any(is_float(d) for d in weak):
        return "float32"
    return max(strong + [d for d in weak if d != "int32"], key=INTS.index)

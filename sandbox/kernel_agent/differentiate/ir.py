"""The intermediate form: a hash-consed graph of pure nodes, placed in a tree of regions, plus ordered effects.

A kernel is math plus schedule. The math lives in `Node`s: pure, shared, with a type and a *home*, the innermost region whose
variables they depend on (so loop invariants are hoisted by construction; nothing leaves an `if`, because a branch guards what
it computes). The schedule lives in `For`, `If` and the write effects. A region is only a loop variable or a condition: the
forward loop and the reverse loop over one range share it, and sibling loops over equal ranges share it too, so that a load in
two of them is one node. Nothing is evaluated in order but effects; `emit` prints what they demand and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

HALF = ("float16", "bfloat16")
FLOATS = ("float8e4nv", "float8e5", "float16", "bfloat16", "float32", "float64")
INTS = ("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def real(dtype: str) -> str:
    """The concrete type behind a symbolic one: `$float16:x_ptr` is the element type of x_ptr, float16 in the traced call."""
    return dtype[1:].split(":")[0] if dtype.startswith("$") else dtype


def is_float(dtype: str) -> bool:
    return real(dtype) in FLOATS


def adjoint_dtype(dtype: str) -> str:
    """Adjoints are kept in float32; in float64 where the forward is."""
    return "float64" if real(dtype) == "float64" else "float32"


class Region:
    """The top of a kernel, the body of a loop, or one branch of an `if`."""

    def __init__(self, kind: str, parent: Region | None, key: tuple = (), line: int | None = None) -> None:
        self.kind, self.parent, self.key, self.line = kind, parent, key, line
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.iv: Node | None = None  # loop variable; None for top, while and branches
        self.bounds: tuple[Node, Node, Node] | None = None
        self.call: str = "range"  # how the user spelled the range
        self.cond: Node | None = None
        self.positive: bool = True
        self.skips = (
            False  # a branch that only saves work: what does not vary in the loop around it may leave it
        )

    @property
    def is_loop(self) -> bool:
        return self.kind in ("for", "while")

    def chain(self) -> Iterator[Region]:
        region: Region | None = self
        while region is not None:
            yield region
            region = region.parent

    def inside(self, other: Region) -> bool:
        return any(region is other for region in self.chain())


class Node:
    """A value: operation, arguments, attributes; identity is equality (see `Graph.make`)."""

    __slots__ = (
        "active",
        "args",
        "attrs",
        "dtype",
        "hint",
        "home",
        "id",
        "line",
        "op",
        "reverse",
        "shape",
        "upstream",
    )

    def __init__(
        self, ident: int, op: str, args: tuple, attrs: dict, dtype: str, shape: tuple, home: Region
    ) -> None:
        self.id, self.op, self.args, self.attrs = ident, op, args, attrs
        self.dtype, self.shape, self.home = dtype, shape, home
        self.active = False  # depends on a value that wants a gradient
        self.hint: str | None = None  # the user's name for it
        self.line: int | None = None  # line of the forward file it comes from
        self.reverse = False  # made by the reverse sweep
        self.upstream = False  # depends on an upstream gradient

    def __repr__(self) -> str:
        return f"%{self.id}:{self.op}({', '.join('%' + str(a.id) for a in self.args)}){self.attrs or ''}"

    @property
    def is_float(self) -> bool:
        return is_float(self.dtype)

    @property
    def weak(self) -> bool:
        """Python numbers and constexprs take the type of what they meet."""
        return self.op in ("const", "constexpr") or bool(self.attrs.get("weak"))

    @property
    def value(self) -> Any:
        return self.attrs["value"]


@dataclass
class Carry:
    phi: Node
    init: Node
    next: Node | None = None


@dataclass(eq=False)
class Store:
    """A write of the forward: `kind` is store or atomic_add; `base` is a pointer parameter."""

    base: Node
    offset: Node
    mask: Node | None
    value: Node
    kind: str
    region: Region
    line: int | None


@dataclass(eq=False)
class GradWrite:
    """A write of the backward: add `value` to the gradient of what `base` points to."""

    base: Node
    offset: Node
    mask: Node | None
    value: Node
    region: Region
    line: int | None
    kind: str = "atomic_add"  # or "store", once proven disjoint
    proof: str = ""  # why it is a store, or why it is not
    layouts: list = field(default_factory=list)  # lists of (stride, extent) pairs that the host checks
    covers: Node | None = None  # how many elements it reaches, where that is known
    advice: str = ""  # the better schedule that could not be proven


@dataclass(eq=False)
class TapeStore:
    buffer: str
    index: Node
    value: Node
    region: Region
    mask: Node | None = None


@dataclass(eq=False)
class For:
    """One walk over a loop region. `order` is forward, reverse or any; a while loop has only forward."""

    region: Region
    outer: Region
    carries: list[Carry] = field(default_factory=list)
    effects: list = field(default_factory=list)
    order: str = "forward"
    cond: Node | None = None  # while loops
    line: int | None = None
    source: For | None = None  # the forward loop that a reverse loop undoes
    provides: dict[Node, Node] = field(default_factory=dict)  # forward carries read back from a tape
    tape: list[TapeStore] = field(default_factory=list)
    outs: dict[int, Node] = field(default_factory=dict)


@dataclass(eq=False)
class If:
    cond: Node
    then: Region
    other: Region
    then_effects: list = field(default_factory=list)
    other_effects: list = field(default_factory=list)
    outer: Region | None = None
    static: bool = False
    line: int | None = None
    outs: list[Node] = field(default_factory=list)


class Graph:
    """Makes nodes: simplifies, shares equal ones, finds their home."""

    def __init__(self) -> None:
        self.top = Region("top", None)
        self.here = self.top
        self.table: dict[tuple, Node] = {}
        self.regions: dict[tuple, Region] = {}
        self.count = 0
        self.reverse = False
        self.line: int | None = None
        self.true = self.const(True)
        self.one = self.const(1)

    # regions

    def loop_region(self, lo: Node, hi: Node, step: Node, call: str, line: int | None) -> Region:
        key = ("for", id(self.here), lo.id, hi.id, step.id, call)
        region = self.regions.get(key)
        if region is None:
            region = self.regions[key] = Region("for", self.here, key, line)
            region.bounds, region.call = (lo, hi, step), call
            region.iv = self._new("iv", (), {"region": id(region)}, "int32", (), region)
            if any(node.dtype == "int64" for node in (lo, hi, step)):
                region.iv.dtype = "int64"
        return region

    def while_region(self, line: int | None) -> Region:
        return Region("while", self.here, (), line)

    def branch(self, cond: Node, positive: bool) -> Region:
        key = ("if", id(self.here), cond.id, positive)
        region = self.regions.get(key)
        if region is None:
            region = self.regions[key] = Region("then" if positive else "else", self.here, key)
            region.cond, region.positive = cond, positive
        return region

    # nodes

    def _new(self, op: str, args: tuple, attrs: dict, dtype: str, shape: tuple, home: Region) -> Node:
        self.count += 1
        node = Node(self.count, op, args, attrs, dtype, shape, home)
        node.line, node.reverse = self.line, self.reverse
        node.upstream = any(arg.upstream for arg in args)
        return node

    def const(self, value: Any, dtype: str | None = None, shape: tuple = ()) -> Node:
        if dtype is None:
            dtype = "int1" if isinstance(value, bool) else "int32" if isinstance(value, int) else "float32"
            if isinstance(value, int) and not isinstance(value, bool) and not -(2**31) <= value < 2**31:
                dtype = "int64"
        if shape:
            return self.make("full", (self.const(value),), {}, dtype, shape)
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
        from . import simplify

        args, attrs = tuple(args), attrs or {}
        if dtype is None:
            dtype = promote(args)
            if op == "div" and real(dtype) in HALF:  # no GPU divides those: Triton widens both sides
                dtype = "float32"
        if shape is None:
            shape = broadcast_shape(self, [arg.shape for arg in args])
        if op in ELEMENTWISE and any(arg.op in STRETCHED for arg in args):
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
        node.active = node.is_float and op not in DETACHED and any(arg.active for arg in args)
        self.table[(key, id(home))] = node
        return node

    def fresh(self, op: str, attrs: dict, dtype: str, shape: tuple, home: Region, args: tuple = ()) -> Node:
        """A node that equals no other: a loop carry, the result of a loop or of an `if`."""
        return self._new(op, args, attrs, dtype, shape, home)

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

    def number(self, value: float) -> Node:
        return self.const(float(value))

    def where(self, cond: Node, a: Node, b: Node) -> Node:
        return self.make("where", (cond, a, b), dtype=promote((a, b)))

    def call(self, name: str, *args: Node) -> Node:
        return self.make("call", args, {"fn": name})

    def cast(self, a: Node, dtype: str) -> Node:
        return self.make("cast", (a,), {"to": dtype}, dtype, a.shape)

    def again(self, node: Node, args: list[Node]) -> Node:
        """The same operation on other arguments, from the same line."""
        reverse, self.reverse = self.reverse, node.reverse
        line, self.line = self.line, node.line
        new = self.make(node.op, args, node.attrs, node.dtype, node.shape)
        self.reverse, self.line = reverse, line
        if new.op == "load":
            new.active, new.upstream = node.active, node.upstream
        new.upstream = new.upstream or node.upstream
        return new

    def lanes(self, shape: tuple, axis: int) -> Node:
        """What one axis adds to the row-major number of an element of a block."""
        lane = self.make("arange", (self.const(0), shape[axis]), {}, "int32", (shape[axis],))
        for other in range(len(shape)):
            if other != axis:
                lane = self.expand(lane, other)
        for dim in shape[axis + 1 :]:
            lane = self.mul(lane, dim)
        return lane

    def expand(self, a: Node, axis: int) -> Node:
        shape = (*a.shape[:axis], self.one, *a.shape[axis:])
        return self.make("expand", (a,), {"axis": axis}, a.dtype, shape)

    def broadcast(self, a: Node, shape: tuple) -> Node:
        return self.make("broadcast", (a,), {}, a.dtype, shape)

    def reduce(self, fn: str, a: Node, axis: int, keep: bool = False, dtype: str | None = None) -> Node:
        shape = (*a.shape[:axis], *a.shape[axis + 1 :])
        node = self.make("reduce", (a,), {"fn": fn, "axis": axis}, dtype or a.dtype, shape)
        return self.expand(node, axis) if keep else node

    # facts

    def launched(self, grid: tuple[int, ...]) -> dict[int, Any]:
        """The counts of programs of the traced launch, for `concrete`."""
        return {self.intern("npid", (), {"axis": a}, "int32", ()).id: count for a, count in enumerate(grid)}

    def concrete(self, node: Node, known: dict[int, Any] | None = None) -> Any:
        """The value of a constexpr or of a parameter in the traced call, None where it is not known before the launch.

        `known`: values of further nodes, by their ids.
        """
        return _concrete(node, dict(known or {}))

    def is_one(self, dim: Node) -> bool:
        return dim.op == "const" and dim.value == 1


ELEMENTWISE = {"add", "sub", "mul", "div", "clamp", "maximum", "minimum", "where", "compare", "and", "or"}
ARITHMETIC = {"add", "sub", "mul", "div"}
STRETCHED = {"broadcast", "expand", "full"}
DETACHED = {"compare", "floordiv", "mod", "argreduce", "pid", "npid", "arange", "isnone"}


def _core(node: Node) -> Node:
    """The number that fills all lanes of a block; the node itself where there is none."""
    core = node
    while core.op in STRETCHED and core.args:
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
    from .fence import Refusal

    rank = max((len(s) for s in shapes), default=0)
    out: list[Node] = []
    for axis in range(rank):
        dim = g.one
        for shape in shapes:
            at = axis - (rank - len(shape))
            if at < 0 or g.is_one(shape[at]):
                continue
            if g.is_one(dim):
                dim = shape[at]
            elif dim is not shape[at] and g.concrete(dim) != g.concrete(shape[at]):
                raise Refusal(
                    "broadcast", f"blocks of {g.concrete(dim)} and {g.concrete(shape[at])} do not combine"
                )
            elif shape[at].op == "const":  # prefer the name over the number
                pass
            elif dim.op == "const":
                dim = shape[at]
        out.append(dim)
    return tuple(out)


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


def _concrete(node: Node, memo: dict[int, Any]) -> Any:
    if node.id in memo:
        return memo[node.id]
    value: Any = None
    if node.op in ("const", "constexpr"):
        value = node.value
    elif node.op == "param":
        value = node.attrs.get("traced")
    elif node.op == "isnone":
        value = bool(node.attrs["none"])
    elif node.op in _FOLD:
        args = [_concrete(arg, memo) for arg in node.args]
        if all(arg is not None for arg in args) and not node.shape:
            value = fold(node.op, args, node.attrs)
    memo[node.id] = value
    return value


def _cdiv_floor(a: Any, b: Any) -> Any:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_FOLD: dict[str, Callable[..., Any] | None] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "pow": lambda a, b: a**b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: _cdiv_floor(a, b) if isinstance(a, int) and isinstance(b, int) else a // b,
    "mod": lambda a, b: a - _cdiv_floor(a, b) * b,
    "cdiv": lambda a, b: -(-a // b),
    "next_power_of_2": lambda a: 1 << (a - 1).bit_length() if a > 0 else 0,
    "minimum": min,
    "maximum": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "land": lambda a, b: a and b,
    "lor": lambda a, b: a or b,
    "not": lambda a: not a,
    "select": lambda cond, a, b: a if cond else b,
    "neg": lambda a: -a,
    "invert": lambda a: (not a) if isinstance(a, bool) else ~a,
    "compare": None,
    "cast": None,
}


def fold(op: str, args: list, attrs: dict) -> Any:
    try:
        if op == "compare":
            return COMPARE[attrs["cmp"]](*args)
        if op == "cast":
            return float(args[0]) if is_float(attrs["to"]) else int(args[0])
        operation = _FOLD[op]
        return None if operation is None else operation(*args)
    except (TypeError, ZeroDivisionError, OverflowError):
        return None


def walk(effects: list) -> Iterator[Any]:
    """All effects, outer ones first."""
    for effect in effects:
        yield effect
        if isinstance(effect, For):
            yield from walk(effect.effects)
        elif isinstance(effect, If):
            yield from walk(effect.then_effects)
            yield from walk(effect.other_effects)


def operands(item: Any) -> list:
    """Everything a node or an effect directly consists of, loop bodies included."""
    if isinstance(item, Node):
        extra: list = []
        if item.op == "loopout":
            extra = [item.attrs["loop"]]
        elif item.op == "ifout":
            extra = [item.attrs["if"], item.attrs["then"], item.attrs["other"]]
        return [n for n in (*item.args, *item.shape, *extra) if n is not None]
    if isinstance(item, For):
        parts = [n for c in item.carries for n in (c.phi, c.init, c.next)]
        taped = [item.source] if item.source is not None and item.source.tape else []
        extra = [*item.provides.values(), *item.tape, *taped]
        return [
            n
            for n in (*(item.region.bounds or ()), item.cond, *parts, *item.effects, *extra)
            if n is not None
        ]
    if isinstance(item, If):
        return [item.cond, *item.then_effects, *item.other_effects]
    if isinstance(item, TapeStore):
        return [n for n in (item.index, item.value, item.mask) if n is not None]
    return [n for n in (item.base, item.offset, item.mask, item.value) if n is not None]


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Nodes and effects that `roots` need, each once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        stack.extend(operands(item))

"""The intermediate form: a hash-consed graph of pure nodes in a tree of regions, plus ordered effects.

A kernel is math plus schedule. The math lives in `Node`s: pure, shared, with a type and a *home*, the
innermost region whose variables they depend on (so loop invariants are hoisted by construction; nothing
leaves an `if`, because a branch guards what it computes). The schedule lives in `For`, `If` and the write
effects. A region is only a loop variable or a condition: the forward loop and the reverse loop over one range
share it, and sibling loops over equal ranges share it too, so that a load in two of them is one node. Nothing
is evaluated in order but effects; `emit` prints what they demand and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

HALF = ("float16", "bfloat16")
# Of an element.
BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8e4nv": 1,
    "float8e5": 1,
}
FLOATS = ("float8e4nv", "float8e5", "float16", "bfloat16", "float32", "float64")
INTS = ("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def real(dtype: str) -> str:
    """The type behind a symbolic one: `$float16:x_ptr` is that of x_ptr's elements, float16 when traced."""
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
        self.stages: str = ""  # of which loads run ahead; "": what Triton takes
        self.cond: Node | None = None
        self.positive: bool = True
        self.skips = False  # a branch that only saves work: what does not vary in the loop may leave it

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

    def excludes(self, other: Region, counts: Callable[[Node], bool] = lambda cond: True) -> bool:
        """Whether both lie in different branches of one condition of which `counts` holds."""
        mine = {_asked(r.cond, r.positive) for r in self.chain() if r.cond is not None and counts(r.cond)}
        return any(_asked(r.cond, not r.positive) in mine for r in other.chain() if r.cond is not None)


def _asked(cond: Node, positive: bool) -> tuple:
    """A condition and its answer; of `a != b`, those of `a == b`, and of `not a`, those of `a`."""
    while cond.op == "not":
        (cond,), positive = cond.args, not positive
    if cond.op == "compare" and cond.attrs["cmp"] in ("==", "!="):
        return ("==", cond.args, positive is (cond.attrs["cmp"] == "=="))
    return (cond, positive)


class Node:
    """A value: operation, arguments, attributes; identity is equality (see `Graph.make`)."""

    __slots__ = (
        "active", "args", "attrs", "dtype", "hint", "home", "id", "line", "op", "reverse", "shape",
        "upstream",
    )  # fmt: skip

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
    kind: str = "atomic_add"  # or "store", once proven disjoint; "add", if nothing else is written meanwhile
    proof: str = ""  # why it is a store, or why it is not
    layouts: list = field(default_factory=list)  # lists of (stride, extent) pairs that the host checks
    asked: list = field(default_factory=list)  # what it asks of tensors
    covers: Node | None = None  # how many elements it reaches, where that is known
    advice: str = ""  # the better schedule that could not be proven
    left_out: bool = False  # where the host passes no gradient to write to


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
    waits: bool = False  # for what a loop above it has stored
    split: Any = None  # schedule.split_loops.Split: by which ranges it is walked


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


def bodies(effect: object) -> tuple[list, ...]:
    """The lists of effects inside a loop or a branch."""
    if isinstance(effect, For):
        return (effect.effects,)
    return (effect.then_effects, effect.other_effects) if isinstance(effect, If) else ()


def walk(effects: list) -> Iterator[Any]:
    """All effects, outer ones first."""
    for effect in effects:
        yield effect
        for body in bodies(effect):
            yield from walk(body)


def placed(effects: list, kind: type, loops: tuple[For, ...] = ()) -> Iterator[tuple[Any, tuple[For, ...]]]:
    """The effects of one kind, each with the loops around it."""
    for effect in effects:
        if isinstance(effect, kind):
            yield effect, loops
        around = (*loops, effect) if isinstance(effect, For) else loops
        for body in bodies(effect):
            yield from placed(body, kind, around)


def beneath(node: Node, *ops: str) -> Node:
    """What operations of some kinds are applied to."""
    while node.op in ops:
        node = node.args[0]
    return node


def sides(node: Node) -> list[Node]:
    """The values that an `if` chooses from: one, where the other branch makes none."""
    return [node.attrs[k] for k in ("then", "other") if node.attrs[k] is not None]


def operands(item: Any) -> list:
    """Everything a node or an effect directly consists of, loop bodies included."""
    parts: list
    if isinstance(item, Node):
        parts = [*item.args, *item.shape]
        if item.op == "loopout":
            parts.append(item.attrs["loop"])
        elif item.op == "ifout":
            parts += [item.attrs["if"], item.attrs["then"], item.attrs["other"]]
    elif isinstance(item, For):
        carries = [n for c in item.carries for n in (c.phi, c.init, c.next)]
        taped = [item.source] if item.source is not None and item.source.tape else []
        parts = [*(item.region.bounds or ()), item.cond, *carries, *item.effects]
        parts += [*item.provides.values(), *item.tape, *taped]
        parts += [] if item.split is None else item.split.points
    elif isinstance(item, If):
        parts = [item.cond, *item.then_effects, *item.other_effects]
    elif isinstance(item, TapeStore):
        parts = [item.index, item.value, item.mask]
    else:
        parts = [item.base, item.offset, item.mask, item.value]
    return [part for part in parts if part is not None]


def reachable(roots: Iterable[Any], parts: Callable[[Any], Iterable[Any]] = operands) -> Iterator[Any]:
    """Nodes and effects that `roots` need, each once; `parts` says what one of them consists of."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        stack.extend(parts(item))


def nodes_in(roots: Iterable[Any]) -> Iterator[Node]:
    """The values among all that `roots` need, each once."""
    return (item for item in reachable(roots) if isinstance(item, Node))


def mapped(write: Any, of: Callable[[Node], Node]) -> Any:
    """A write of other values: those that `of` gives for its own. Itself where they are the same."""
    names = [name for name in ("base", "index", "offset", "value", "mask") if getattr(write, name, None)]
    new = {name: of(getattr(write, name)) for name in names}
    same = all(value is getattr(write, name) for name, value in new.items())
    return write if same else replace(write, **new)

"""Values while a kernel is interpreted: numbers, nodes, pointers and tuples of them, and what is known of
conditions.
"""

from __future__ import annotations

import ast
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

from ..ir.graph import Graph, int_dtype
from ..ir.nodes import If, Node, Region, Store, nodes_in
from ..ir.refusal import Refusal
from ..ir.values import Arg, BlockPtr, Either, Poison, Ptr, Returned, is_static, signature
from .block_uses import Place, Uses
from .settled import settled

Access = tuple[Node, Node, Node | None, Region]  # what is read: base, offset and mask, and where


def language_name(module: ModuleType | SimpleNamespace) -> str:
    """What a file calls triton.language; "tl" where it has no name for it."""
    return next((n for n, v in vars(module).items() if getattr(v, "__name__", "") == "triton.language"), "tl")


class Values:
    """What a kernel is interpreted with: its graph, what names stand for, what it has read and written."""

    def __init__(
        self,
        source: ast.FunctionDef,
        module: ModuleType | SimpleNamespace,
        functions: dict[str, ast.FunctionDef],
        args: dict[str, Arg],
        folds: frozenset[int] = frozenset(),
        facts: dict[tuple, bool] | None = None,
        whole: str | None = None,
    ):
        """`folds`: lines of conditions of which the branch that the traced call does not take is left out.
        `facts`: the answers to conditions, by their signatures, for a kernel of such calls alone. `whole`: a
        constexpr that reaches over all of each range that it is the step of."""
        self.g = Graph()
        self.whole = whole
        self.spread: tuple[str, int] | None = None  # a block of which programs along an axis have a part each
        self.folds, self.facts = folds, facts or {}
        self.source, self.module, self.functions, self.args = source, module, functions, args
        self.effects: list = []
        self.env: dict[str, Any] = {}
        self.endings: list[dict[str, Any]] = []  # what names stand for after the last statement
        # In the kernel's own text, not that of helpers: what each gave, and what its names stood for.
        self.called: list[tuple[ast.Call, Node, dict[str, Any]]] = []
        self.looped: dict[
            Node, ast.Call
        ] = {}  # what calls there, outside of loops, gave by loops that only read
        self.plain: list[ast.For] = []  # loops whose variable is the number of the step
        self.stored: list[Store] = []
        self.added: set[str] = set()  # buffers that are added to atomically
        self.loaded: list[Access] = []
        self.apart: list[tuple[Store, Node, Node | None, Region]] = []  # stores, and reads beside them
        self.inplace: set[str] = set()
        self.either: set[str] = set()  # numbers that may be tensors in other calls
        self.entries: dict[str, list[Node]] = {}  # pointers by the table that they come from
        self.depth = 0
        self.uses = Uses()  # names for those of blocks
        self.within: Place = ()  # the calls of helpers around what is interpreted
        self.tl = language_name(module)

    def leaves(self, value: Any) -> list[Node]:
        if isinstance(value, Ptr):
            return [value.offset]
        if isinstance(value, BlockPtr):
            return [value.start, *value.shape, *value.strides, *value.offsets]
        if isinstance(value, tuple):
            return [leaf for item in value for leaf in self.leaves(item)]
        node = self.try_node(value)
        return [] if node is None else [node]

    def rebuild(self, like: Any, leaves: list[Node]) -> Any:
        if isinstance(like, Ptr):
            return Ptr(like.base, leaves[0])
        if isinstance(like, BlockPtr):
            n = len(like.block)
            shape, strides, offsets = (tuple(leaves[1 + i * n : 1 + (i + 1) * n]) for i in range(3))
            return BlockPtr(like.base, leaves[0], shape, strides, offsets, like.block)
        if isinstance(like, tuple):
            rest = iter(leaves)
            return tuple(self.rebuild(item, list(islice(rest, len(self.leaves(item))))) for item in like)
        return leaves[0] if leaves else like

    def chosen(self, value: Any, name: str) -> Any:
        """The value of a name at this place: of two shapes, the one that the flags asked here choose."""
        while isinstance(value, Either):
            then, other = Region("then", None), Region("else", None)
            then.cond = other.cond = value.cond
            other.positive = False
            if self.g.here.excludes(then):
                value = value.other
            elif self.g.here.excludes(other):
                value = value.then
            else:
                return Poison(f"`{name}` has another shape in each of the two branches")
        return value

    def try_node(self, value: Any) -> Node | None:
        if isinstance(value, (bool, int, float)):
            return self.g.const(value)
        return value if isinstance(value, Node) else None

    def node(self, value: Any) -> Node:
        if isinstance(value, Poison):
            raise Refusal(value.construct, value.why, fold=value.fold)
        node = self.try_node(value)
        if node is None:
            raise Refusal(
                type(value).__name__, "a number or a block is expected here", "Pass a number or a block."
            )
        return node

    def literal(self, value: Any) -> bool | None:
        """The truth of a condition that does not depend on any argument, is one of the facts, or follows from
        the conditions around it."""
        if not isinstance(value, Node):
            return bool(value)
        if value.op == "not":
            inner = self.literal(value.args[0])
            return None if inner is None else not inner
        if value.op == "const":
            return bool(value.value)
        if not is_static(value):
            return None
        found = self.facts.get(signature(value)) if self.facts else None
        if found is not None and self.g.concrete(value) is not None:
            self.g.answers[value] = found
            self.g.elsewhere |= bool(self.g.concrete(value)) is not found
        return settled(self.g, value) if found is None else found

    def decided(self, cond: Node) -> bool | None:
        """How the traced call decides a condition that the host can ask for; None where it cannot. What it
        leaves out need not have an adjoint then: the host refuses calls that decide otherwise."""
        names = [n.attrs["name"] for n in nodes_in([cond]) if n.op == "constexpr"]
        if not is_static(cond) or any(name not in self.args for name in names):
            return None
        found = self.g.concrete(cond)
        return None if found is None else bool(found)

    def number(self, value: Any) -> Any:
        """A Python number, from a literal or a constexpr."""
        if isinstance(value, Node):
            found = self.g.concrete(value) if is_static(value) else None
            if found is None:
                raise Refusal("constexpr", "a value known at compile time is expected here")
            return found
        return value

    def dims(self, value: Any) -> tuple[Node, ...]:
        items = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(self.node(item) for item in items)

    def _param(self, arg: Arg) -> Node:
        g = self.g
        if arg.kind == "pointer":
            attrs = {"name": arg.name, "none": arg.none, "elem": arg.dtype or "float32"}
            node = g.intern("param", (), attrs, "pointer", ())
            node.active = arg.active
            return node
        dtype = "float32" if isinstance(arg.value, float) else "int32"
        if arg.kind == "constexpr":
            dtype = "int1" if isinstance(arg.value, bool) else dtype
            return g.intern("constexpr", (), {"name": arg.name, "value": arg.value}, dtype, ())
        if isinstance(arg.value, int):
            dtype = int_dtype(arg.value)
        return g.intern("param", (), {"name": arg.name, "traced": arg.value}, dtype, ())

    # of those that are made of this

    def block(self, statements: list[ast.stmt]) -> Returned | None:
        """Interpret statements; what they return."""
        raise NotImplementedError

    def merge(self, stmt: If, a: Any, b: Any, name: str) -> Any:
        """What a name stands for after an `if`."""
        raise NotImplementedError

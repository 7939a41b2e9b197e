"""What the interpretation of a kernel handles besides nodes: pointers, types, arguments; and questions about
syntax and nodes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from ...source import tree_nodes
from .graph import Graph
from .nodes import For, Node, Region, Store, nodes_in


@dataclass(frozen=True)
class Ptr:
    """A pointer: the parameter it is based on, and an integer offset in elements."""

    base: Node
    offset: Node


@dataclass(frozen=True)
class BlockPtr:
    base: Node
    start: Node
    shape: tuple
    strides: tuple
    offsets: tuple
    block: tuple


@dataclass(frozen=True)
class DType:
    name: str


@dataclass(frozen=True)
class PtrType:
    base: Node


@dataclass(frozen=True)
class PointerTo:
    """`tl.pointer_type(...)`: what an address from a table is cast to."""

    element: str


@dataclass(frozen=True)
class Poison:
    """A value that must not be used: one that depends on the branch taken and cannot be merged, or an
    atomic's result."""

    why: str
    construct: str = "branch-dependent value"
    fold: int | None = None  # the line of a condition without which it could be used, as in the traced call


@dataclass(frozen=True)
class Either:
    """A name that a flag gives values of different shapes: it is used where the flag is asked again."""

    cond: Node
    then: Any
    other: Any


@dataclass
class Returned:
    value: Any


@dataclass
class Arg:
    """One argument of the traced launch."""

    name: str
    kind: str  # pointer, int, float, constexpr
    value: Any = None  # number, or None for tensors
    dtype: str | None = None  # element type of a pointer
    active: bool = False
    storage: int = 0  # equal for arguments that share memory
    none: bool = False
    equal: str | None = None  # another that every launch here passes the same number
    behind: Arg | None = None  # of a table of addresses: what it points to; `value` has their storages


@dataclass(frozen=True)
class StepCall:
    """A call in the kernel's own text that is made once in every step of a loop over `range(n)`, or over its
    like, in the body of the kernel: `statement` is one of the loop's own, with lines of its own."""

    loop: ast.For
    statement: ast.stmt
    call: ast.Call


@dataclass
class Kernel:
    """The forward of one launch."""

    name: str
    graph: Graph
    params: dict[str, Node]
    effects: list
    args: dict[str, Arg]
    tl: str
    inplace: set[str] = field(default_factory=set)
    equal: dict[Node, Node] = field(default_factory=dict)  # values that another loop ends with too
    line: int | None = None
    variables: dict[str, Node] = field(default_factory=dict)  # where the kernel ends
    calls: dict[Node, str] = field(default_factory=dict)  # with their text, which would give the same there
    looped: dict[Node, ast.Call] = field(default_factory=dict)  # what calls of helpers with loops give
    of_steps: dict[Node, StepCall] = field(default_factory=dict)  # what sums and the like in loops give
    carried: dict[Node, tuple[Node, Node | None]] = field(default_factory=dict)  # as read: first, and next
    either: set[str] = field(default_factory=set)  # numbers that may be tensors of integers in other calls
    # all that is read, also for nothing: base, offset and mask
    loaded: list[tuple[Node, Node, Node | None]] = field(default_factory=list)
    # stores, and what is read of their buffers elsewhere: offset, mask and place
    apart: list[tuple[Store, Node, Node | None, Region]] = field(default_factory=list)


def bases(value: Any) -> list[Node]:
    """What the pointers in a value are based on."""
    if isinstance(value, tuple):
        return [base for item in value for base in bases(item)]
    return [value.base] if isinstance(value, (Ptr, BlockPtr)) else []


def loop_out(g: Graph, loop: For, index: int) -> Node:
    """The value of a carry after the loop."""
    if index not in loop.outs:
        phi = loop.carries[index].phi
        out = g.fresh("loopout", {"loop": loop, "index": index}, phi.dtype, phi.shape, loop.outer)
        out.active, out.hint = phi.active, phi.hint
        loop.outs[index] = out
    return loop.outs[index]


def takes_loop(node: Node) -> bool:
    """Whether a value is computed from the result of a loop, or of one of which the forward saved tiles."""
    return any(n.op == "loopout" or n.attrs.get("tile") for n in nodes_in([node]))


def is_static(node: Node) -> bool:
    """Whether a value is known when the kernel is compiled."""
    if node.op in ("const", "constexpr", "isnone"):
        return True
    if node.shape or node.op in ("load", "ifout", "reduce"):
        return False
    return bool(node.args) and all(map(is_static, node.args))


def signature(node: Node) -> tuple:
    """What a value is made of: the same in two graphs of one kernel."""
    attrs = tuple(sorted((name, repr(value)) for name, value in node.attrs.items()))
    return (node.op, attrs, *map(signature, node.args))


def positive(cond: Node) -> Node:
    """A condition without its negations."""
    while cond.op == "not":
        (cond,) = cond.args
    return cond


def is_named(dtype: str) -> bool:
    """Whether a type is what a constexpr parameter says, not that of a tensor's elements."""
    return dtype.startswith("$") and dtype.endswith(":")


def dtype_text(dtype: str, tl: str) -> str:
    """Source text of a type; the name of a parameter that is one."""
    if dtype.startswith("$"):
        name = dtype.split(":")[1]
        return name if is_named(dtype) else name + ".dtype.element_ty"
    return f"{tl}.{dtype}"


def is_helper(function: Any) -> bool:
    if not hasattr(function, "fn"):
        return False
    # Under TRITON_INTERPRET the module of `function` itself is Triton's.
    module = getattr(function.fn, "__module__", "") or ""
    return module.partition(".")[0] != "triton"


def offset_name(name: str) -> str:
    for suffix in ("ptrs", "ptr"):
        if name.endswith(suffix):
            return name[: -len(suffix)] + "offs"
    return name + "_offs"


def returns(node: ast.If) -> bool:
    return any(isinstance(child, ast.Return) for child in tree_nodes(node))


def counted(
    node: ast.While,
) -> tuple[str, ast.expr, ast.expr, list[ast.stmt], ast.expr | None] | None:
    """`while i < n: ...; i += step` is a loop over a range, if i and n change nowhere else; so is one that
    counts down by a literal, and one that counts before its end. The last is m of `while i >= m and i < n`,
    which a loop that counts up need ask once."""
    low: ast.expr | None = None
    test = node.test
    match test:
        case ast.BoolOp(
            ast.And(),
            [ast.Compare(ast.Name(first), [ast.GtE()], [least]), ast.Compare(ast.Name(second)) as rest],
        ) if first == second:
            low, test = least, rest
    for name, sign, high in _bounds(test):
        steps = [(s, step) for s in node.body if (step := _stepped(s, name, sign)) is not None]
        if len(steps) != 1 or (low is not None and sign < 0):
            continue
        ((statement, step),) = steps
        others = [one for one in node.body if one is not statement]
        body = others if node.body[-1] is statement else node.body
        changed = set(assigned_names(others))
        asked = [e for e in (high, step, low) if e is not None]
        used = {n.id for e in asked for n in tree_nodes(e) if isinstance(n, ast.Name)}
        if name not in changed | used and not used & changed:
            return name, high, step, body, low
    return None


def _bounds(test: ast.expr) -> list[tuple[str, int, ast.expr]]:
    """What a condition may be the end of: (name, direction, the first number that is not reached)."""
    turned = {ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Lt: ast.Gt, ast.LtE: ast.GtE}
    found: list[tuple[str, int, ast.expr]] = []
    match test:
        case ast.Compare(left, [op], [right]) if type(op) in turned:
            for side, kind, end in ((left, type(op), right), (right, turned[type(op)], left)):
                if not isinstance(side, ast.Name):
                    continue
                if kind in (ast.Lt, ast.LtE):
                    beyond = ast.BinOp(end, ast.Add(), ast.Constant(1))
                    found.append((side.id, 1, end if kind is ast.Lt else beyond))
                elif kind in (ast.Gt, ast.GtE):
                    beyond = ast.BinOp(end, ast.Sub(), ast.Constant(1))
                    found.append((side.id, -1, end if kind is ast.Gt else beyond))
    return found


def _stepped(statement: ast.stmt, name: str, sign: int) -> ast.expr | None:
    """What a statement adds to a variable, in a direction; downwards it has to be a literal."""
    match statement:
        case ast.AugAssign(ast.Name(target), op, step) if target == name:
            pass
        case ast.Assign([ast.Name(target)], ast.BinOp(ast.Name(old), op, step)) if target == old == name:
            pass
        case _:
            return None
    if isinstance(op, ast.Add) and sign > 0:
        return step
    literal = isinstance(step, ast.Constant) and isinstance(step.value, int) and step.value > 0
    return ast.UnaryOp(ast.USub(), step) if isinstance(op, ast.Sub) and sign < 0 and literal else None


def assigned_names(body: list[ast.stmt]) -> list[str]:
    return [
        node.id
        for statement in body
        for node in tree_nodes(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def step_of(g: Graph, phi: Node, out: Node) -> Node | None:
    """c where out = phi + c."""
    if out.op == "add":
        for part, rest in (out.args, out.args[::-1]):
            if part is phi:
                return rest if not mentions(rest, phi) else None
        for part, rest in (out.args, out.args[::-1]):
            inner = step_of(g, phi, part)
            if inner is not None and not mentions(rest, phi):
                return g.add(inner, rest)
    if out.op == "sub" and out.args[0] is phi and not mentions(out.args[1], phi):
        return g.neg(out.args[1])
    return None


def mentions(node: Node, wanted: Node) -> bool:
    return node is wanted or any(mentions(arg, wanted) for arg in node.args)


def quotient(g: Graph, a: Node, b: Node) -> Node | None:
    """a / b where a is a product that contains b."""
    if a is b:
        return g.one
    if a.op == "const" and b.op == "const" and a.value % b.value == 0:
        return g.const(a.value // b.value)
    if a.op == "mul":
        for part, rest in (a.args, a.args[::-1]):
            found = quotient(g, part, b)
            if found is not None:
                return g.mul(found, rest)
    return None


def carried(node: Node) -> bool:
    """Whether the value of `node` changes with the iterations of an enclosing loop through a carry."""
    return node.op == "phi" or any(carried(arg) for arg in node.args)

"""Mutations of a backward kernel: each function yields the mutants of a few related kinds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from mutate_text import Mutant, Text, called, names_in

_WRITES = ("store", "atomic_add")
# Values written by a kernel, and what becomes of them.
_VALUES: dict[str, Callable[[str], str]] = {
    "zeroed": lambda value: f"({value}) * 0.0",
    "scaled by 1.01": lambda value: f"({value}) * 1.01",
    "scaled by 2": lambda value: f"({value}) * 2.0",
    "sign flipped": lambda value: f"-({value})",
    "narrowed to float16": lambda value: f"({value}).to(tl.float16)",
}
_LANES_MEET = frozenset(
    {"sum", "max", "min", "dot", "cumsum", "cumprod", "associative_scan", "reduce", "argmax", "argmin"}
)
_INTEGER_CALLS = frozenset(
    {"arange", "program_id", "cdiv", "num_programs", "load", "make_block_ptr", "advance", "full", "zeros"}
)
_INTEGER_NAMES = ("ptr", "off", "mask", "cols", "rows", "start", "row", "col", "idx", "pid")
_RENAMED = {"exp": "exp2", "exp2": "exp", "log": "log2", "log2": "log"}
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def of_kernel(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for make in (values, writes, masks, others, bounds, reductions, loops, arithmetic):
        yield from make(text, kernel)
    for make in (accumulators, casts, transposes, addresses, programs, branches, functions):
        yield from make(text, kernel)


def is_integer_work(node: ast.Assign | ast.AugAssign) -> bool:
    """Addresses and masks: a term dropped there ends out of bounds, which says little about the
    comparison."""
    target = ast.unparse(node.target if isinstance(node, ast.AugAssign) else node.targets[0]).lower()
    return any(name in target for name in _INTEGER_NAMES) or any(
        called(inner) in _INTEGER_CALLS for inner in ast.walk(node.value)
    )


def _calls(kernel: ast.FunctionDef, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call) and called(node) in names:
            yield node


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


# ---- what is written


def values(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, *_WRITES):
        for kind, change in _VALUES.items():
            if len(call.args) > 1:
                yield text.replace(kind, call.args[1], change(text.of(call.args[1])))


def writes(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(kernel):
        if isinstance(node, ast.Expr) and called(node.value) in _WRITES:
            yield text.replace("write removed", node, "pass")
    for call in _calls(kernel, "atomic_add"):
        yield text.replace("atomic replaced by store", call, text.of(call).replace("atomic_add", "store", 1))


# ---- which lanes


def masks(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, *_WRITES, "load"):
        kept = [text.of(arg) for arg in call.args]
        kept += [f"{k.arg}={text.of(k.value)}" for k in call.keywords if k.arg not in ("mask", "other")]
        if _keyword(call, "mask") is not None:
            yield text.replace("mask removed", call, f"{text.of(call.func)}({', '.join(kept)})")
    for call in _calls(kernel, "where"):
        if len(call.args) == 3:
            yield text.replace("mask removed", call, text.of(call.args[1]))


def others(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    """`other=` of loads whose lanes meet later: in the rest, what a masked lane holds is never written."""
    for node in ast.walk(kernel):
        if not isinstance(node, ast.Assign):
            continue
        for call in ast.walk(node.value):
            other = _keyword(call, "other") if called(call) == "load" else None  # type: ignore[arg-type]
            if other is not None and _lanes_meet(kernel, node):
                zero = text.of(other) in ("0", "0.0")
                yield text.replace("other changed", other, "1.0" if zero else "0.0")


def _lanes_meet(kernel: ast.FunctionDef, source: ast.Assign) -> bool:
    """Whether a sum or the like follows that takes what was loaded, as far as names tell."""
    derived = names_in(source.targets[0])
    for node in _following(kernel, source):
        if any(called(call) in _LANES_MEET and derived & names_in(call) for call in ast.walk(node)):
            return True
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = names_in(node.target if isinstance(node, ast.AugAssign) else node.targets[0])
            if derived & names_in(node.value):
                derived |= targets
            elif isinstance(node, ast.Assign):
                derived -= targets
    return False


def _following(kernel: ast.FunctionDef, source: ast.Assign) -> list[ast.stmt]:
    """The simple statements after `source`, and those before it in the loop around it, which come next
    time."""
    simple = [n for n in ast.walk(kernel) if isinstance(n, (ast.Assign, ast.AugAssign, ast.Expr))]
    simple.sort(key=lambda node: node.lineno)
    after = [n for n in simple if n.lineno > source.lineno]
    loops = [n for n in ast.walk(kernel) if isinstance(n, (ast.For, ast.While)) and source in ast.walk(n)]
    if not loops:
        return after
    first, last = loops[0].lineno, loops[0].end_lineno or 0
    inside = [n for n in after if n.lineno <= last]
    return inside + [n for n in simple if first < n.lineno < source.lineno] + after


def bounds(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(kernel):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED and len(node.ops) == 1:
            left, right = text.of(node.left), text.of(node.comparators[0])
            yield text.replace("bound off by one", node, f"{left} {_COMPARED[type(node.ops[0])]} {right}")


# ---- sums and loops


def reductions(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    """Only of blocks with two axes: of one axis there is no other."""
    if "None]" not in text.of(kernel) and "[None" not in text.of(kernel):
        return
    for call in _calls(kernel, "sum", "max", "min", "cumsum"):
        axis = _keyword(call, "axis") or (call.args[1] if len(call.args) == 2 else None)
        if isinstance(axis, ast.Constant) and axis.value in (0, 1):
            yield text.replace("wrong reduction axis", axis, str(1 - axis.value))
            if called(call) == "sum":
                whole = f"{text.of(call.func)}({text.of(call.args[0])})"
                yield text.replace("summed over both axes", call, whole)


def loops(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for loop in ast.walk(kernel):
        if not isinstance(loop, ast.For) or called(loop.iter) not in ("range", "static_range"):
            continue
        args = loop.iter.args  # type: ignore[attr-defined]
        step = text.of(args[2]) if len(args) == 3 else "1"
        stop = args[0] if len(args) == 1 else args[1]
        yield text.replace("loop ends one step early", stop, f"({text.of(stop)}) - {step}")
        if len(args) < 3:  # with a step the mask ends the work, one step more is nothing
            yield text.replace("loop runs one step long", stop, f"({text.of(stop)}) + 1")
        if len(args) > 1:
            yield text.replace("loop begins one step late", args[0], f"({text.of(args[0])}) + {step}")


# ---- arithmetic


def arithmetic(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(kernel):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and not is_integer_work(node):
            yield from _dropped(text, node.value)
        elif isinstance(node, ast.Call) and called(node) in _WRITES and len(node.args) > 1:
            yield from _dropped(text, node.args[1])


def _dropped(text: Text, value: ast.expr) -> Iterator[Mutant]:
    shifts = [n.args[0] for n in ast.walk(value) if called(n) in ("exp", "exp2")]  # type: ignore[attr-defined]
    for node in ast.walk(value):
        if not isinstance(node, ast.BinOp):
            continue
        left, right = f"({text.of(node.left)})", f"({text.of(node.right)})"
        match node.op:
            case ast.Sub() if any(node is shift for shift in shifts):
                yield text.replace("exponent not shifted", node, left)
            case ast.Add() | ast.Sub():
                sign = "-" if isinstance(node.op, ast.Sub) else ""
                yield text.replace("term dropped", node, left)
                yield text.replace("term dropped", node, f"({sign}{right})")
                yield text.replace("term negated", node, f"{left} {'+' if sign else '-'} {right}")
            case ast.Mult():
                yield text.replace("factor dropped", node, left)
                yield text.replace("factor dropped", node, right)
            case ast.Div():
                yield text.replace("factor dropped", node, left)


def accumulators(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for loop in ast.walk(kernel):
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        for node in loop.body:
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and not is_integer_work(node):
                target, value = text.of(node.target), text.of(node.value)
                yield text.replace(
                    "accumulated in float16", node, f"{target} = ({target} + ({value})).to(tl.float16)"
                )
                yield text.replace("overwritten in the loop", node, f"{target} = {value}")


def casts(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, "to"):
        if len(call.args) == 1 and text.of(call.args[0]) == "tl.float32":
            yield text.replace("cast to float16", call.args[0], "tl.float16")


def transposes(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(kernel):
        if called(node) == "trans" and len(node.args) == 1:  # type: ignore[attr-defined]
            yield text.replace("transpose dropped", node, text.of(node.args[0]))  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and node.attr == "T":
            yield text.replace("transpose dropped", node, text.of(node.value))


# ---- where


def addresses(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    """`a * S + b * T` becomes `a * T + b * S`, and `a * S + b` becomes `a + b * S`."""
    inner: set[int] = set()
    for node in ast.walk(kernel):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)) or id(node) in inner:
            continue
        terms = _terms(node, inner)
        products = [t for t in terms if isinstance(t, ast.BinOp) and isinstance(t.op, ast.Mult)]
        plain = [t for t in terms if isinstance(t, (ast.Name, ast.Subscript)) and "ptr" not in text.of(t)]
        if not _in_address(text, kernel, node):
            continue
        if len(products) > 1:
            yield text.swap("strides swapped", node, products[0].right, products[1].right)
        elif products and plain and products[0].lineno == plain[-1].lineno:
            new = text.of(node).replace(text.of(products[0]), text.of(products[0].left), 1)
            new = new[::-1].replace(
                text.of(plain[-1])[::-1], f"{text.of(plain[-1])} * {text.of(products[0].right)}"[::-1], 1
            )[::-1]
            yield text.replace("strides swapped", node, new)


def _terms(node: ast.expr, inner: set[int]) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        inner |= {id(node.left), id(node.right)}
        return _terms(node.left, inner) + _terms(node.right, inner)
    return [node]


def _in_address(text: Text, kernel: ast.FunctionDef, wanted: ast.AST) -> bool:
    for node in ast.walk(kernel):
        if called(node) in (*_WRITES, "load"):
            if any(inner is wanted for inner in ast.walk(node.args[0])):  # type: ignore[attr-defined]
                return True
        elif isinstance(node, ast.Assign) and node.value is wanted:
            name = text.of(node.targets[0])
            pointers = [c.args[0] for c in _calls(kernel, *_WRITES, "load")]
            return any(name in names_in(pointer) for pointer in pointers)
    return False


def programs(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, "program_id"):
        axis = call.args[0] if call.args else _keyword(call, "axis")
        if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
            yield text.replace("wrong program axis", axis, "1" if axis.value == 0 else "0")


# ---- the rest


def branches(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, "where"):
        if len(call.args) == 3:
            yield text.swap("branches swapped", call, call.args[1], call.args[2])


def functions(text: Text, kernel: ast.FunctionDef) -> Iterator[Mutant]:
    for call in _calls(kernel, *_RENAMED):
        new = _RENAMED[called(call)]
        if isinstance(call.func, ast.Attribute):
            yield text.replace("wrong base", call.func, f"{text.of(call.func.value)}.{new}")

"""Expressions of a kernel: what each means over nodes."""

from __future__ import annotations

import ast
import builtins
import operator
from types import SimpleNamespace
from typing import Any

from ..ir.folding import COMPARE
from ..ir.nodes import Node, real, sides
from ..ir.refusal import Refusal
from ..ir.values import BlockPtr, DType, Poison, Ptr, PtrType, dtype_text, is_static
from . import language
from .kernel_values import Values


class Expressions(Values):
    """Interprets everything that has a value, but calls."""

    def expr(self, node: ast.expr) -> Any:
        method = getattr(self, "_" + type(node).__name__.lower(), None)
        try:
            if method is None:
                raise Refusal(
                    type(node).__name__.lower(),
                    "this expression is not supported in a kernel",
                    "Write numbers, blocks and tuples.",
                )
            return method(node)
        except Refusal as refusal:
            raise refusal.at(node) from None

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.env:
            value = self.chosen(self.env[node.id], node.id)
            if isinstance(value, Poison):
                raise Refusal(value.construct, value.why, fold=value.fold)
            return self._used(value, node)
        if node.id in vars(self.module):
            value = vars(self.module)[node.id]
            if hasattr(value, "value") and type(value).__name__ == "constexpr":
                value = value.value
            if isinstance(value, (int, float)) and isinstance(self.module, SimpleNamespace):
                return value  # the generated code has no such name
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                dtype = "float32" if isinstance(value, float) else "int32"
                attrs = {"name": node.id, "value": value, "global": True}
                return self.g.intern("constexpr", (), attrs, dtype, ())
            return value
        if hasattr(builtins, node.id):
            return getattr(builtins, node.id)
        raise Refusal("name", f"`{node.id}` is not defined")

    def _used(self, value: Any, node: ast.Name) -> Any:
        """A value where its name stands: a block may have a name of its own there."""
        if not isinstance(value, Node) or value.op != "constexpr":
            return value
        known = value.attrs["name"]
        name = self.uses.name(known, (*self.within, (node.lineno, node.col_offset)))
        attrs = {**value.attrs, "name": name}
        return value if name == known else self.g.intern("constexpr", (), attrs, value.dtype, ())

    def _tuple(self, node: ast.Tuple) -> tuple:
        return tuple(self.expr(item) for item in node.elts)

    _list = _tuple

    def _binop(self, node: ast.BinOp) -> Any:
        return self.binary(node.op, self.expr(node.left), self.expr(node.right))

    def binary(self, op: ast.operator, a: Any, b: Any) -> Any:
        g = self.g
        if isinstance(a, Ptr) or isinstance(b, Ptr):
            return self._pointer_arithmetic(op, a, b)
        if isinstance(a, tuple) and isinstance(b, tuple) and isinstance(op, ast.Add):
            return a + b
        name = _BINARY.get(type(op))
        if name is None:
            raise Refusal(type(op).__name__.lower(), "this operator is not supported in a kernel")
        x, y = self.node(a), self.node(b)
        if name == "div" and not (x.is_float or y.is_float):
            return g.make("div", (x, y), {}, "float32")
        if name == "pow" and not (is_static(x) and is_static(y)):
            message = "a power of a block is not an operation of Triton"
            raise Refusal("**", message, "Use libdevice.pow or a product.")
        if name == "mod" and (x.is_float or y.is_float):
            return g.make("fmod", (x, y))
        if name == "floordiv" and (x.is_float or y.is_float):
            raise Refusal("float floordiv", "Triton has no floor division of floats", "Use tl.floor(a / b).")
        if name == "mul" and x.dtype == y.dtype == "int1":  # masks, multiplied
            return g.both(x, y)
        return g.make(name, (x, y))

    def _pointer_arithmetic(self, op: ast.operator, a: Any, b: Any) -> Ptr:
        g = self.g
        if isinstance(op, ast.Add):
            ptr, other = (a, b) if isinstance(a, Ptr) else (b, a)
            return Ptr(ptr.base, g.add(ptr.offset, self.node(other)))
        if isinstance(op, ast.Sub) and isinstance(a, Ptr) and not isinstance(b, Ptr):
            return Ptr(a.base, g.sub(a.offset, self.node(b)))
        raise Refusal("pointer arithmetic", "only adding and subtracting offsets is supported")

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.expr(node.operand)
        name, plain = _UNARY[type(node.op)]
        if not isinstance(value, Node):
            return plain(value)
        if name == "pos":
            return value
        return self.g.make(name, (value,), {}, "int1" if name == "not" else value.dtype)

    def _boolop(self, node: ast.BoolOp) -> Any:
        result = self.expr(node.values[0])
        for item in node.values[1:]:
            known = self.literal(result)
            if known is not None:
                if known != isinstance(node.op, ast.And):
                    return result
                result = self.expr(item)
                continue
            op = "land" if isinstance(node.op, ast.And) else "lor"
            result = self.g.make(op, (result, self.node(self.expr(item))), {}, "int1")
        return result

    def _compare(self, node: ast.Compare) -> Any:
        left, result = self.expr(node.left), None
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.expr(right_node)
            one = self.compare(op, left, right)
            if result is not None:
                one = self.g.make("land", (self.node(result), self.node(one)), {}, "int1")
            left, result = right, one
        return result

    def compare(self, op: ast.cmpop, a: Any, b: Any) -> Any:
        if isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(a, Ptr) and b is None):
            return self._is(a, b, isinstance(op, (ast.IsNot, ast.NotEq)))
        symbol = _COMPARE.get(type(op))
        if symbol is None:
            raise Refusal("comparison", "this comparison is not supported in a kernel")
        if isinstance(a, Node) or isinstance(b, Node):
            if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
                a, b = (
                    x if isinstance(x, Node) else self.g.intern("const", (), {"value": x}, "int32", ())
                    for x in (a, b)
                )
            return self.g.compare(symbol, self.node(a), self.node(b))
        if isinstance(a, DType) and isinstance(b, DType) and "$" in (a.name[0], b.name[0]):
            return self._dtype_test(a, b, symbol)
        try:
            return COMPARE[symbol](a, b)
        except TypeError:
            message = "a pointer or a tuple has no order"
            raise Refusal("comparison", message, "Compare what is loaded, or numbers.") from None

    def _dtype_test(self, a: DType, b: DType, symbol: str) -> Node:
        equal = real(a.name) == real(b.name)
        attrs: dict[str, Any] = {
            "name": f"({dtype_text(a.name, self.tl)} {symbol} {dtype_text(b.name, self.tl)})"
        }
        attrs["of"] = tuple(n.split(":")[1] for n in (a.name, b.name) if n.startswith("$"))
        return self.g.intern("constexpr", (), {**attrs, "value": equal == (symbol == "==")}, "int1", ())

    def _is(self, a: Any, b: Any, negate: bool) -> Any:
        pointer = isinstance(a, Ptr)
        one = a.offset if pointer else a
        if b is None and isinstance(one, Node) and one.op == "ifout" and len(sides(one)) == 1:
            return self._left_out(one, negate)
        if b is not None or not (pointer or (isinstance(a, Node) and a.op == "constexpr")):
            return (a is b) != negate
        none = a.base.attrs["none"] if pointer else a.value is None
        found = self.g.make("isnone", (a.base if pointer else a,), {"none": none}, "int1", ())
        return self.g.make("not", (found,), {}, "int1") if negate else found

    def _left_out(self, value: Node, negate: bool) -> Node:
        """Whether a value is None, which one branch of an `if` leaves it: what that asks."""
        cond, first = value.args[0], value.attrs["then"] is None
        return cond if first is not negate else self.g.make("not", (cond,), {}, "int1")

    def _ifexp(self, node: ast.IfExp) -> Any:
        cond = self.expr(node.test)
        known = self.literal(cond)
        if known is not None:
            return self.expr(node.body if known else node.orelse)
        taken, mark = self.decided(cond), len(self.loaded)
        stmt = self.g.fork(cond, is_static(cond), node.lineno)
        found: list[Any] = []
        for region, part in ((stmt.then, node.body), (stmt.other, node.orelse)):
            try:
                with self.g.at(region):
                    found.append(self.expr(part))
            except Refusal:
                if taken is None or taken is (region is stmt.then):
                    raise
        result = self.merge(stmt, found[0], found[1], "value") if len(found) == 2 else None
        if taken is not None and (len(found) < 2 or isinstance(result, Poison)):
            del self.loaded[mark:]
            self.g.folded[cond] = taken, node.lineno
            return self.expr(node.body if taken else node.orelse)
        self.effects.append(stmt)
        if isinstance(result, Node) and result.op == "ifout":
            result.hint = None
        return result

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self.expr(node.value)
        if isinstance(value, (Node, Ptr, BlockPtr, DType, PtrType)):
            return language.attribute(self, value, node.attr)  # type: ignore[arg-type]
        if hasattr(value, node.attr):
            return language.from_python(getattr(value, node.attr))
        raise Refusal("attribute", f"`.{node.attr}` is not supported")

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self.expr(node.value)
        if isinstance(value, tuple):
            return value[self.number(self.expr(node.slice))]
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        out = self.node(value)
        for axis, item in enumerate(items):
            if isinstance(item, ast.Constant) and item.value is None:
                out = self.g.expand(out, axis)
            elif not isinstance(item, ast.Slice) or item.lower or item.upper or item.step:
                raise Refusal("indexing", "a block can be indexed with `:` and None only").at(node)
        return out


_UNARY: dict[type, tuple[str, Any]] = {
    ast.USub: ("neg", operator.neg),
    ast.UAdd: ("pos", operator.pos),
    ast.Not: ("not", operator.not_),
    ast.Invert: ("invert", operator.invert),
}
_BINARY: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "shr",
}
_COMPARE: dict[type, str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}

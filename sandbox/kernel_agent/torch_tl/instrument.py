"""Rewrite a kernel's source so that every operation on it goes through a Runtime (`__ka__`).

Line numbers are kept, so that tracebacks and errors point into the user's file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_agent.torch_tl.runtime import Runtime

RUNTIME = "__ka__"
BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.MatMult: "matmul",
}
UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Not: "not", ast.Invert: "invert"}
COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


def rewritten(function: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """`function` with its operations evaluated by `runtime`; it sees its globals as they are now."""
    names = {**function.__globals__, **inspect.getclosurevars(function).nonlocals, RUNTIME: runtime}
    made: dict[str, Any] = {}
    exec(_compiled(function), names, made)  # noqa: S102 (the kernel itself, rewritten)
    result: Callable[..., Any] = made[function.__name__]
    result.__defaults__ = function.__defaults__
    result.__kwdefaults__ = function.__kwdefaults__
    return result


_codes: dict[CodeType, CodeType] = {}


def _compiled(function: Callable[..., Any]) -> CodeType:
    code = _codes.get(function.__code__)
    if code is None:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        tree = ast.fix_missing_locations(Rewriter().visit(tree))
        ast.increment_lineno(tree, first - 1)
        code = _codes[function.__code__] = compile(tree, function.__code__.co_filename, "exec")
    return code


class Rewriter(ast.NodeTransformer):
    """One method a construct; anything not listed is ordinary Python on compile-time values."""

    def _runtime(self, method: str, *args: ast.expr, at: ast.AST) -> ast.Call:
        target = ast.Attribute(ast.Name(RUNTIME, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(target, list(args), []), at)

    def _visit(self, node: ast.expr) -> ast.expr:
        result: ast.expr = self.visit(node)
        return result

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        node.returns = None
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            arg.annotation = None
        # Real defaults are put in place of these, which only have to exist.
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
        node.body = [self.visit(statement) for statement in node.body]
        return node

    # ---- expressions

    def visit_Call(self, node: ast.Call) -> ast.expr:
        keywords = [ast.keyword(word.arg, self._visit(word.value)) for word in node.keywords]
        call = self._runtime("call", self._visit(node.func), *map(self._visit, node.args), at=node)
        call.keywords = keywords
        return call

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not isinstance(node.ctx, ast.Load):
            return node
        return self._runtime("attribute", self._visit(node.value), ast.Constant(node.attr), at=node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self._runtime("index", self._visit(node.value), self._visit(node.slice), at=node)

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        parts = (node.lower, node.upper, node.step)
        bounds = [ast.Constant(None) if part is None else self._visit(part) for part in parts]
        # A slice object is made without naming `slice`, which a kernel may have shadowed.
        return self._runtime("slice", *bounds, at=node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        name = ast.Constant(BINARY[type(node.op)])
        return self._runtime("binary", name, self._visit(node.left), self._visit(node.right), at=node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return self._runtime("unary", ast.Constant(UNARY[type(node.op)]), self._visit(node.operand), at=node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        sides = [self._visit(side) for side in (node.left, *node.comparators)]
        pairs = zip(node.ops, sides, sides[1:], strict=False)
        parts = [self._comparison(op, left, right, node) for op, left, right in pairs]
        return parts[0] if len(parts) == 1 else self._logical("and", parts, node)

    def _comparison(self, op: ast.cmpop, left: ast.expr, right: ast.expr, at: ast.AST) -> ast.expr:
        if isinstance(op, (ast.Is, ast.IsNot)):
            same = self._runtime("identical", left, right, at=at)
            return same if isinstance(op, ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), same), at)
        if type(op) in COMPARE:
            return self._runtime("compare", ast.Constant(COMPARE[type(op)]), left, right, at=at)
        return ast.copy_location(ast.Compare(left, [op], [right]), at)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        kind = "and" if isinstance(node.op, ast.And) else "or"
        return self._logical(kind, [self._visit(value) for value in node.values], node)

    def _logical(self, kind: str, parts: list[ast.expr], at: ast.AST) -> ast.expr:
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        late = [ast.Lambda(none, part) for part in parts]
        return self._runtime("logical", ast.Constant(kind), *late, at=at)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test = self._runtime("truth", self._visit(node.test), at=node)
        return ast.copy_location(ast.IfExp(test, self._visit(node.body), self._visit(node.orelse)), node)

    # ---- statements

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = self._runtime("assign", self._visit(node.value), at=node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        if not isinstance(node.target, ast.Name):
            raise SyntaxError(f"line {node.lineno}: only variables can be assigned to in a kernel")
        whole = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], whole), node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        kind = "constant" if ast.unparse(node.annotation).split(".")[-1].startswith("constexpr") else "assign"
        value = self._runtime(kind, self._visit(node.value), at=node)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_If(self, node: Any) -> Any:
        node.test = self._runtime("truth", self._visit(node.test), at=node.test)
        return self._bodies(node)

    visit_While = visit_If

    def visit_For(self, node: ast.For) -> ast.For:
        node.iter = self._visit(node.iter)
        return self._bodies(node)

    def _bodies(self, node: Any) -> Any:
        node.body = [self.visit(statement) for statement in node.body]
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        message = ast.Constant("") if node.msg is None else self._visit(node.msg)
        check = self._runtime("check", self._visit(node.test), message, at=node)
        return ast.copy_location(ast.Expr(check), node)

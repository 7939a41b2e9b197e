"""Rewrite a kernel's source so that every operation on it goes through a Runtime (`__ka__`).

Line numbers are kept, so that tracebacks and errors point into the user's file.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeGuard

from ..source import tree_nodes

if TYPE_CHECKING:
    from kernel_agent.torch_tl.runtime import Runtime

RUNTIME = "__ka__"
LOCALS = "__ka_locals__"
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
Names = tuple[tuple[str, ...], ...]  # of parting.Names, in its order
COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


def rewritten(function: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """`function` with its operations evaluated by `runtime`; it sees its globals as they are now."""
    names = {
        **function.__globals__,
        **inspect.getclosurevars(function).nonlocals,
        RUNTIME: runtime,
        LOCALS: locals,
    }
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


def loads(node: ast.AST) -> list[tuple[str, int]]:
    """Each time that a variable is read, and the line."""
    names = [
        part for part in tree_nodes(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    ]
    updates = [part.target for part in tree_nodes(node) if is_update(part)]
    return [(name.id, name.lineno) for name in (*names, *updates) if isinstance(name, ast.Name)]


def stores(node: ast.AST) -> set[str]:
    return {
        name.id for name in tree_nodes(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }


def is_update(node: ast.AST) -> TypeGuard[ast.AugAssign]:
    return isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)


def leaves(node: ast.AST, loop: bool = False) -> bool:
    """Whether a statement can be left for a place that is not behind it: a return, or what goes on in, or
    behind, a loop around it."""
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not loop):
        return True
    inside = loop or isinstance(node, ast.For | ast.While)
    return any(leaves(child, inside) for child in ast.iter_child_nodes(node))


def placeless(text: str) -> ast.stmt:
    """A statement that is in no line yet."""
    (made,) = ast.parse(text).body
    for part in tree_nodes(made):
        for place in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(part, place):
                delattr(part, place)
    return made


class Rewriter(ast.NodeTransformer):
    """One method a construct; anything not listed is ordinary Python on compile-time values.

    A loop or branch gets an object that tells when programs part there, and code that gives each variable
    the values of those that go on (parting.py)."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, int]] = []  # of the function
        self.variables: set[str] = set()
        self.loops: list[int] = []  # around: their first lines
        self.statements = 0

    def _runtime(self, method: str, *args: ast.expr, at: ast.AST) -> ast.Call:
        target = ast.Attribute(ast.Name(RUNTIME, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(target, list(args), []), at)

    def _visit(self, node: ast.expr) -> ast.expr:
        result: ast.expr = self.visit(node)
        return result

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.loads = loads(node)
        self.variables = stores(node) | {arg.arg for arg in tree_nodes(node.args) if isinstance(arg, ast.arg)}
        node.decorator_list = []
        node.returns = None
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            arg.annotation = None
        # Real defaults are put in place of these, which only have to exist.
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
        node.body = [new for statement in node.body for new in self._statements(statement)]
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

    def visit_If(self, node: ast.If) -> Any:
        if leaves(node):
            node.test = self._runtime("truth", self._visit(node.test), at=node.test)
            return self._bodies(node)
        apart, names = self._apart(node)
        test = self._runtime("decided", self._visit(node.test), at=node.test)
        side = f"{apart}_side"
        branch = ast.If(ast.Name(side, ast.Load()), node.body, node.orelse)
        self._bodies(branch)
        loop = ast.For(
            ast.Name(side, ast.Store()),
            ast.Name(apart, ast.Load()),
            [self._narrowed(apart, names), branch],
            [],
        )
        return self._parting(node, apart, "sides", [self._names(names), test], loop, names)

    def visit_While(self, node: ast.While) -> Any:
        if node.orelse or leaves(node):
            node.test = self._runtime("truth", self._visit(node.test), at=node.test)
            return self._inner(node)
        apart, names = self._apart(node)
        test = self._runtime("decided", self._visit(node.test), at=node.test)
        goes = ast.Call(ast.Attribute(ast.Name(apart, ast.Load()), "goes", ast.Load()), [test], [])
        self._inner(node)
        loop = ast.While(ast.copy_location(goes, node), [self._narrowed(apart, names), *node.body], [])
        return self._parting(node, apart, "rounds", [self._names(names)], loop, names)

    def visit_For(self, node: ast.For) -> Any:
        values = self._visit(node.iter)
        if node.orelse or leaves(node) or not isinstance(node.target, ast.Name):
            node.iter = self._runtime("same_turns", values, at=node)
            return self._inner(node)
        apart, names = self._apart(node)
        self._inner(node)
        turn = f"{apart}_turn"
        taken = ast.Assign([node.target], ast.Name(turn, ast.Load()))
        body = [self._narrowed(apart, names), taken, *node.body]
        loop = ast.For(ast.Name(turn, ast.Store()), ast.Name(apart, ast.Load()), body, [])
        return self._parting(node, apart, "turns", [self._names(names), values], loop, names)

    def _inner(self, node: Any) -> Any:
        self.loops.append(node.lineno)
        self._bodies(node)
        self.loops.pop()
        return node

    def _bodies(self, node: Any) -> Any:
        for body in (node.body, node.orelse):
            body[:] = [new for statement in body for new in self._statements(statement)]
        return node

    def _statements(self, statement: ast.stmt) -> list[ast.stmt]:
        made = self.visit(statement)
        return made if isinstance(made, list) else [made]

    # ---- where programs part

    def _apart(self, node: ast.stmt) -> tuple[str, Names]:
        """A name for a statement's object, and its variables."""
        self.statements += 1
        inside, stored = {name for name, _ in loads(node)}, stores(node)
        behind = self.loops[0] if self.loops else (node.end_lineno or node.lineno) + 1
        later = self.variables & {name for name, line in self.loads if line >= behind}
        read = (self.variables & inside) | (stored & later)
        sets = (read, stored & later, later - stored, stored - later)
        return f"{RUNTIME}{self.statements}", tuple(tuple(sorted(names)) for names in sets)

    def _names(self, names: Names) -> ast.expr:
        made = placeless(repr(names))
        assert isinstance(made, ast.Expr)
        return made.value

    def _parting(
        self, node: ast.stmt, apart: str, method: str, args: list[ast.expr], loop: ast.stmt, names: Names
    ) -> list[ast.stmt]:
        made = ast.Assign([ast.Name(apart, ast.Store())], self._runtime(method, *args, at=node))
        _, changed, kept, dead = names
        after = self._if_so(f"{apart}.parted", apart, "meet", (*changed, *kept, *dead))
        return [ast.copy_location(statement, node) for statement in (made, loop, after)]

    def _narrowed(self, apart: str, names: Names) -> ast.stmt:
        return self._if_so(f"{apart}.cut is not None", apart, "narrow", names[0])

    def _if_so(self, flag: str, apart: str, method: str, names: Iterable[str]) -> ast.stmt:
        """What a method returns for all variables that there are, given to these."""
        lines = [f"if {flag}:", f"    {apart}_now = {apart}.{method}({LOCALS}())"]
        lines += [f"    if {name!r} in {apart}_now: {name} = {apart}_now[{name!r}]" for name in names]
        return placeless("\n".join(lines))

    def visit_Assert(self, node: ast.Assert) -> ast.Expr:
        message = ast.Constant("") if node.msg is None else self._visit(node.msg)
        check = self._runtime("check", self._visit(node.test), message, at=node)
        return ast.copy_location(ast.Expr(check), node)

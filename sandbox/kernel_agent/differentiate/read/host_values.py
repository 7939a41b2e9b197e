"""What a host function's text says about the tensors that it launches kernels with.

A traced call sees whether a tensor carries gradients in that call. The text says whether that may be
otherwise in another one: a tensor that is chosen between others, a buffer that an earlier turn of a loop has
written.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

from ...source import tree_nodes
from .host_functions import Method

# What is asked of a tensor and has none of its values, and what cuts off its gradient.
ASKED = {"shape", "device", "dtype", "stride", "numel", "size", "ndim", "dim", "element_size", "detach"}
ALLOCATED = {"empty", "zeros", "ones", "full", "empty_strided"}
LIKE = {f"{name}_like" for name in (*ALLOCATED, "rand", "randn")}
NEW = {f"new_{name}" for name in ALLOCATED}


class Host:
    """One host function, with its callers. `constant`: by the name of a function, those of its parameters
    that no call gives a gradient. `handed`: functions that the module hands on, so that not all their calls
    are known."""

    def __init__(
        self,
        function: ast.FunctionDef,
        functions: dict[str, ast.FunctionDef],
        constant: dict[str, set[str]] | None = None,
        handed: set[str] | None = None,
        until: ast.Call | None = None,
    ) -> None:
        """`until`: what the statement of a call assigns, or one behind it, is not seen, where no loop comes
        back to that."""
        self.function = function
        self.constant, self.handed = constant or {}, handed or set()
        self.calls = [
            call
            for other in functions.values()
            for call in tree_nodes(other)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == function.name
        ]
        self.parameters = {a.arg for a in tree_nodes(function.args) if isinstance(a, ast.arg)}
        self.assigned: dict[str, list[ast.expr | None]] = {}  # None: by a loop or in place
        for node in _before(function, until):
            self._note(node)
        self.callers = [
            (other, call)
            for other in functions.values()
            for call in self.calls
            if other is not function and other.lineno <= call.lineno <= (other.end_lineno or 0)
        ]
        self.functions = functions
        self.helpers = {name: one for name, one in functions.items() if one is not function}

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, (ast.AugAssign, ast.For)):
            targets, value = [node.target], None
        else:
            return
        for target in targets:
            for part, own in _unpacked(target, value):
                for name in tree_nodes(part):
                    if isinstance(name, ast.Name):
                        self.assigned.setdefault(name.id, []).append(own)

    def changes(self, written: ast.expr) -> bool:
        """Whether a tensor that carries no gradient may carry one in another call: the host chooses it, or
        has allocated it for what may be written there."""
        if self.of_constants(written):
            return False
        names = set[str]()
        todo: list[ast.expr] = [written]
        while todo:
            expression = todo.pop()
            if any(self._chooses(n) for n in _valued(expression)):
                return True
            for name in [n.id for n in _valued(expression) if isinstance(n, ast.Name)]:
                values, given = self.assigned.get(name, []), name in self.parameters
                if len(values) + given > 1 or given and self._given_several(name):
                    return True
                if any(value is not None and _allocates(value) for value in values):
                    return True
                if name not in names:
                    names.add(name)
                    todo += [value for value in values if value is not None]
        return False

    def of_constants(self, written: ast.expr) -> bool:
        """Whether a tensor is made of nothing but parameters that carry no gradient in any call."""
        constant = self.constant.get(self.function.name, set())
        seen, todo = set[str](), [written]
        while todo:
            for node in _valued(todo.pop()):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    return False
                if not isinstance(node, ast.Name) or node.id in seen:
                    continue
                seen.add(node.id)
                values = self.assigned.get(node.id, [])
                given = node.id in self.parameters
                known = given and (node.id in constant or self._given_constants(node.id))
                if None in values or (given or not values) and not known:
                    return False
                todo += [value for value in values if value is not None]
                if any(value is not None and _allocates(value) for value in values):
                    return False
        return bool(seen)

    def _given_constants(self, name: str) -> bool:
        """Whether all callers pass a parameter what carries no gradient, or leave it to its default."""
        named = sum(
            isinstance(node, ast.Name) and node.id == self.function.name
            for other in self.helpers.values()
            for node in tree_nodes(other)
        )
        if (
            self.function.name in self.handed
            or not self.callers
            or not named == len(self.callers) == len(self.calls)
        ):
            return False  # called from itself or from elsewhere, or handed on
        names = [a.arg for a in (*self.function.args.posonlyargs, *self.function.args.args)]
        for caller, call in self.callers:
            if any(isinstance(a, ast.Starred) for a in call.args) or any(
                k.arg is None for k in call.keywords
            ):
                return False
            given = {k.arg: k.value for k in call.keywords} | dict(zip(names, call.args, strict=False))
            others = {key: one for key, one in self.functions.items() if one is not self.function}
            if name in given and not Host(caller, others, self.constant, self.handed, call).of_constants(
                given[name]
            ):
                return False
        return True

    def _given_several(self, name: str) -> bool:
        """Whether callers pass a parameter one of several values."""
        if len(self.calls) > 1 or isinstance(self.function, Method):
            return True
        names = [a.arg for a in (*self.function.args.posonlyargs, *self.function.args.args)]
        for caller, call in self.callers:
            given = {k.arg: k.value for k in call.keywords} | dict(zip(names, call.args, strict=False))
            others = {key: one for key, one in self.functions.items() if one is not self.function}
            if name in given and Host(caller, others, self.constant, self.handed, call).changes(given[name]):
                return True
        return False

    def _chooses(self, node: ast.AST) -> bool:
        """Whether a part of an expression is one of several values, as written or returned."""
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.helpers
        ):
            return isinstance(node, (ast.IfExp, ast.BoolOp))
        helper = self.helpers[node.func.id]
        returned = [n.value for n in tree_nodes(helper) if isinstance(n, ast.Return) and n.value is not None]
        there = Host(helper, self.helpers, self.constant, self.handed)
        return len(returned) > 1 or any(map(there.changes, returned))

    def measured(self, written: ast.expr) -> str | None:
        """What a launch passes, as one text for one value: a size or a stride of a tensor that has its name
        for good, in a variable or not; or whatever has one text where the launch asks for it."""
        value: ast.expr | None = written
        if isinstance(written, ast.Name):
            value = next(iter(self.assigned.get(written.id, [])), None) if self._stays(written.id) else None
        if value is not None and self._stays(_measures(value)):
            return ast.unparse(value)
        return f"now {ast.unparse(written)}" if isinstance(written, ast.Name) or _measures(written) else None

    def _stays(self, name: str | None) -> bool:
        """Whether a name stands for one thing in a call: a parameter, or what is assigned once and in no
        loop."""
        values = self.assigned.get(name or "", [])
        if len(values) + (name in self.parameters) != 1 or None in values:
            return False
        loops = [n for n in tree_nodes(self.function) if isinstance(n, (ast.For, ast.While))]
        return not any(n is value for loop in loops for n in tree_nodes(loop) for value in values)

    def fresh(self, written: ast.expr, launch: ast.Call) -> bool:
        """Whether an output is allocated right before its launch each time, so that it holds nothing."""
        if not isinstance(written, ast.Name):
            return False
        values = self.assigned.get(written.id, [])
        if (
            not values
            or written.id in self.parameters
            or not all(v is not None and _allocates(v) for v in values)
        ):
            return False
        first = min(value.lineno for value in values if value is not None)
        for node in tree_nodes(self.function):
            body = (node.lineno, node.end_lineno or 0) if isinstance(node, (ast.For, ast.While)) else (0, 0)
            if body[0] <= launch.lineno <= body[1] and first < body[0]:
                return False  # a later turn of the loop finds what an earlier one wrote
        return not any(
            isinstance(n, ast.Name)
            and n.id == written.id
            and isinstance(n.ctx, ast.Load)
            and n.lineno < launch.lineno
            for n in _valued(self.function)
        )


def _before(function: ast.FunctionDef, call: ast.Call | None) -> list[ast.AST]:
    """What is done in a function until it makes a call: not the statement of that, nor those behind it."""
    every = list(tree_nodes(function))
    above = {child: node for node in every for child in ast.iter_child_nodes(node)}
    around: list[ast.AST] = [] if call is None else [call]
    while around and around[-1] is not function:
        around.append(above[around[-1]])
    again = ast.For | ast.While | ast.FunctionDef | ast.Lambda
    statements = [node for node in around if isinstance(node, ast.stmt)]
    if not statements or any(isinstance(node, again) for node in around[:-1]):
        return every
    last = statements[0].end_lineno or statements[0].lineno
    return [n for n in every if not isinstance(n, ast.stmt) or (n is not statements[0] and n.lineno <= last)]


def _measures(written: ast.expr) -> str | None:
    """The tensor of which an expression is one size or stride."""
    match written:
        case ast.Call(ast.Attribute(ast.Name(name), "stride" | "size"), [axis], []) if _is_number(axis):
            return name
        case ast.Subscript(ast.Attribute(ast.Name(name), "shape"), axis) if _is_number(axis):
            return name
        case ast.Call(ast.Attribute(ast.Name(name), "numel"), [], []):
            return name
    return None


def _is_number(axis: ast.expr) -> bool:
    return isinstance(axis.operand if isinstance(axis, ast.UnaryOp) else axis, ast.Constant)


def _allocates(value: ast.expr) -> bool:
    """Whether an expression is a new tensor (or None), whatever is chosen in it."""
    if isinstance(value, ast.IfExp):
        return _allocates(value.body) and _allocates(value.orelse)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in ALLOCATED | LIKE | NEW
    return isinstance(value, ast.Constant) and value.value is None


def _valued(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an expression whose values are in its value."""
    if isinstance(node, ast.Attribute) and node.attr in ASKED:
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ALLOCATED | LIKE | NEW
    ):
        return
    yield node
    for part in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.IfExp) and part is node.test):
            yield from _valued(part)


def _unpacked(target: ast.expr, value: ast.expr | None) -> list[tuple[ast.expr, ast.expr | None]]:
    """What is assigned, each with its own value where that is written out: `x, c = x + 1, c` and
    `x, c = (t.contiguous() for t in (x, c))`."""
    if not isinstance(target, (ast.Tuple, ast.List)) or any(isinstance(t, ast.Starred) for t in target.elts):
        return [(target, value)]
    values = _items(value)
    if len(values) != len(target.elts) or any(isinstance(v, ast.Starred) for v in values):
        return [(target, value)]
    return list(zip(target.elts, values, strict=True))


def _items(value: ast.expr | None) -> list[ast.expr]:
    if isinstance(value, (ast.Tuple, ast.List)):
        return value.elts
    if not isinstance(value, (ast.GeneratorExp, ast.ListComp)) or len(value.generators) != 1:
        return []
    (one,) = value.generators
    if one.ifs or not isinstance(one.target, ast.Name) or not isinstance(one.iter, (ast.Tuple, ast.List)):
        return []
    name = one.target.id
    return [_Replace(name, item).visit(copy.deepcopy(value.elt)) for item in one.iter.elts]


class _Replace(ast.NodeTransformer):
    def __init__(self, name: str, item: ast.expr) -> None:
        self.name, self.item = name, item

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.item if node.id == self.name else node

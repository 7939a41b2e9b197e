"""From a kernel's `ast` to the graph: helpers inlined, pointers split, loops with explicit carries.

The kernel is interpreted over nodes. What is a Python number stays one (literals, axes); a constexpr
parameter stays a name with a traced value, so that the backward fits other values too. A loop body is
interpreted until the list of its carries and their types are stable; an integer that steps by an invariant is
replaced by its closed form at once (loop class A).
"""

from __future__ import annotations

import ast
from typing import Any

from ...source import tree_nodes
from ..ir.nodes import For, Node, is_float, nodes_in, operands, reachable, walk
from ..ir.refusal import Refusal
from ..ir.values import Arg, DType, Kernel, Ptr, Returned, StepCall, assigned_names, offset_name, returns
from . import language, syntax_check
from .aliases import Aliases
from .loops import Loops


class Builder(Loops, Aliases):
    """Interprets one kernel over the graph. Owns the graph it makes."""

    def _named(self, arg: Arg, param: Node) -> Ptr | DType | Node:
        """What a parameter's name stands for. A type of floats is the parameter's own: it may be another one
        in other calls."""
        kind = language.from_python(arg.value) if arg.kind == "constexpr" else None
        if isinstance(kind, DType):
            return DType(f"${kind.name}:{arg.name}:") if is_float(kind.name) else kind
        return Ptr(param, self.g.const(0)) if arg.kind == "pointer" else param

    def kernel(self) -> Kernel:
        syntax_check.check(self.source)
        params: dict[str, Node] = {}
        for name, arg in self.args.items():
            params[name] = self._param(arg) if arg.equal is None else params[arg.equal]
            self.env[name] = self._named(arg, params[name])
        self.block(self.source.body)
        self._check_aliases()
        self.g.places = [store.offset for store in self.stored]
        made = (self.source.name, self.g, params, self.effects, self.args, self.tl, self.inplace)
        ending = self.endings[0] if len(self.endings) == 1 else {}
        variables = {name: value for name, value in ending.items() if isinstance(value, Node)}
        loops = [effect for effect in walk(self.effects) if isinstance(effect, For)]
        return Kernel(
            *made,
            line=self.source.lineno,
            variables=variables,
            calls=self._repeatable(ending),
            looped=self.looped,
            of_steps=self._of_steps(),
            carried={c.phi: (c.init, c.next) for loop in loops for c in loop.carries},
            loaded=[(base, offset, mask) for base, offset, mask, _ in self.loaded],
            apart=self.apart,
            either=self.either,
        )

    def _repeatable(self, ending: dict[str, Any]) -> dict[Node, str]:
        """Sums and random numbers that calls in the kernel's own text give, with that text, where the same
        call gives the same where the kernel ends: its names stand for the same, and it reads no memory."""
        found: dict[Node, str] = {}
        for call, value, names in self.called:
            same = value.home is self.g.top and all(ending.get(n) == known for n, known in names.items())
            if same and {n.op for n in nodes_in([value])} & {"reduce", "random"} and not _loads(value, names):
                found.setdefault(value, ast.unparse(call))
        return found

    def _of_steps(self) -> dict[Node, StepCall]:
        """The calls that give sums, maxima and places in each step of a loop, of which each stands where it
        is made in every step, and gives the same in front of its statement."""
        places: dict[ast.Call, StepCall] = {}
        for loop in self.plain:
            counter = loop.target.id  # type: ignore[attr-defined]
            if loop not in self.source.body or counter in assigned_names(loop.body):
                continue
            for statement in loop.body:
                parts = list(tree_nodes(statement))
                simple = isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr)
                certain = not any(isinstance(part, ast.IfExp | ast.BoolOp) for part in parts)
                if simple and certain and _has_lines(statement, loop):
                    calls = [part for part in parts if isinstance(part, ast.Call)]
                    places |= {call: StepCall(loop, statement, call) for call in calls}
        found = [(value, places[call]) for call, value, _ in self.called if call in places]
        return {value: at for value, at in reversed(found) if value.op in ("reduce", "argreduce")}

    def block(self, statements: list[ast.stmt]) -> Returned | None:
        for index, statement in enumerate(statements):
            self.g.line = statement.lineno
            try:
                if isinstance(statement, ast.If) and returns(statement):
                    rest = statements[index + 1 :]
                    return self.branch(statement, [*statement.body, *rest], [*statement.orelse, *rest])
                done = self.statement(statement)
            except Refusal as refusal:
                raise refusal.at(statement) from None
            if statement is self.source.body[-1]:
                self.endings.append(dict(self.env))
            if done is not None:
                return done
        return None

    def statement(self, node: ast.stmt) -> Returned | None:
        if isinstance(node, ast.Return):
            return Returned(None if node.value is None else self.expr(node.value))
        if isinstance(node, ast.Assign):
            value = self.expr(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.expr(node.value))
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.target, ast.Name):
                raise Refusal("assignment target", "only names can be assigned in a kernel").at(node.target)
            old = self.expr(ast.copy_location(ast.Name(node.target.id, ast.Load()), node))
            self.assign(node.target, self.binary(node.op, old, self.expr(node.value)))
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            self.expr(node.value)
        elif isinstance(node, ast.If):
            return self.branch(node, node.body, node.orelse)
        elif isinstance(node, ast.For):
            self.loop(node)
        elif isinstance(node, ast.While):
            self.while_loop(node)
        elif isinstance(node, ast.Assert):
            self.expr(node.test)
        elif not isinstance(node, (ast.Pass, ast.Expr, ast.AnnAssign)):
            raise Refusal(type(node).__name__.lower(), "this statement is not supported in a kernel").at(node)
        return None

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if not isinstance(value, tuple) or len(value) != len(target.elts):
                raise Refusal("unpacking", "the value is not a tuple of this length").at(target)
            for part, item in zip(target.elts, value, strict=True):
                self.assign(part, item)
            return
        if not isinstance(target, ast.Name):
            raise Refusal("assignment target", "only names can be assigned in a kernel").at(target)
        self.env[target.id] = value
        name = target.id
        if isinstance(value, Ptr):
            if value.base.op == "entry" and value.base.hint is None:
                value.base.hint = name
            value, name = value.offset, offset_name(name)
        nameless = isinstance(value, Node) and value.op not in ("const", "constexpr", "param", "iv")
        if nameless and value.hint is None:
            value.hint = name


def _has_lines(statement: ast.stmt, loop: ast.For) -> bool:
    """Whether a statement of a loop shares no line with anything else."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    others = [(one.lineno, one.end_lineno or one.lineno) for one in loop.body if one is not statement]
    head = (loop.lineno, loop.iter.end_lineno or loop.lineno)
    return all(end < first or begin > last for begin, end in (head, *others))


def _loads(value: Node, names: dict[str, Any]) -> bool:
    """Whether what gives a value reads memory, beside what its names stand for."""
    known = {n for n in names.values() if isinstance(n, Node)}
    within = reachable([value], lambda n: [] if n in known else operands(n))
    return any(isinstance(n, Node) and n.op == "load" for n in within)

"""From a kernel's `ast` to the graph: helpers inlined, pointers split, loops with explicit carries.

The kernel is interpreted over nodes. What is a Python number stays one (literals, axes); a constexpr
parameter stays a name with a traced value, so that the backward fits other values too. A loop body is
interpreted until the list of its carries and their types are stable; an integer that steps by an invariant is
replaced by its closed form at once (loop class A).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import operator
import textwrap
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl

from ..ir import address_tables
from ..ir.folding import COMPARE
from ..ir.graph import Graph, broadcast_shape, int_dtype, promote
from ..ir.nodes import Carry, For, If, Node, Region, Store, nodes_in, real
from ..ir.refusal import Refusal
from ..ir.simplify import is_number, is_zero
from ..ir.values import (
    Arg,
    BlockPtr,
    DType,
    Either,
    Kernel,
    Poison,
    Ptr,
    PtrType,
    Returned,
    assigned_names,
    bases,
    counted,
    dtype_text,
    is_helper,
    is_static,
    loop_out,
    offset_name,
    quotient,
    returns,
    signature,
    step_of,
)
from . import language, syntax_check
from .settled import settled

Access = tuple[Node, Node, Node | None, Region]  # what is read: base, offset and mask, and where


def _branches(region: Region) -> set[tuple[Node | None, bool]]:
    """The conditions that something stands under."""
    return {(r.cond, r.positive) for r in region.chain() if r.cond is not None}


class Builder:
    """Interprets one kernel over the graph. Owns the graph it makes."""

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
        self.folds, self.facts = folds, facts or {}
        self.source, self.module, self.functions, self.args = source, module, functions, args
        self.effects: list = []
        self.env: dict[str, Any] = {}
        self.endings: list[dict[str, Any]] = []  # what names stand for after the last statement
        self.stored: list[Store] = []
        self.added: set[str] = set()  # buffers that are added to atomically
        self.loaded: list[Access] = []
        self.apart: list[tuple[Store, Node, Node | None, Region]] = []  # stores, and reads beside them
        self.inplace: set[str] = set()
        self.either: set[str] = set()  # numbers that may be tensors in other calls
        self.entries: dict[str, list[Node]] = {}  # pointers by the table that they come from
        self.depth = 0
        self.tl = next(
            (n for n, v in vars(module).items() if getattr(v, "__name__", "") == "triton.language"), "tl"
        )

    def kernel(self) -> Kernel:
        syntax_check.check(self.source)
        params = {}
        for name, arg in self.args.items():
            params[name] = self._param(arg)
            self.env[name] = Ptr(params[name], self.g.const(0)) if arg.kind == "pointer" else params[name]
        self.block(self.source.body)
        self._check_aliases()
        self.g.places = [store.offset for store in self.stored]
        made = (self.source.name, self.g, params, self.effects, self.args, self.tl, self.inplace)
        ending = self.endings[0] if len(self.endings) == 1 else {}
        variables = {name: value for name, value in ending.items() if isinstance(value, Node)}
        return Kernel(
            *made, line=self.source.lineno, variables=variables, apart=self.apart, either=self.either
        )

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

    def _check_aliases(self) -> None:
        """What is written is read at the same address before, or not at all; other reads of the buffer have
        to be proven apart (`prove.overwrite`)."""
        pairs: list[tuple[Store, Access]] = []
        for store in self.stored:
            base = store.base
            for read in self.loaded:
                other, offset, mask, _ = read
                name, behind = base.attrs["name"], address_tables.storages(self.args, base)
                if base.attrs["none"] or other.attrs["none"]:
                    continue
                if not behind & address_tables.storages(self.args, other):
                    continue
                if store.region.excludes(read[3], is_static):
                    continue
                pairs.append((store, read))
                if base is other and base.op == "param" and name not in self.added:
                    if store.offset is offset and store.mask is mask:
                        self._check_place(store, offset, read[3])
                        self.inplace.add(name)
                    continue
                raise self._elsewhere(name, store.line)
        for store, (_, offset, mask, region) in pairs:
            if store.offset is not offset or store.mask is not mask:
                self.apart.append((store, offset, mask, region))
        stored = {(s.base, s.offset, s.mask) for s, _ in pairs}
        loaded = {read[:3] for _, read in pairs}
        for base, _, _ in loaded - stored:  # it keeps the upstream gradient, and has another besides
            line = next(s.line for s, _ in pairs if s.base is base)
            raise self._elsewhere(base.attrs["name"], line)
        blind = {s for s, _ in pairs if s.value.is_float and (s.base, s.offset, s.mask) not in loaded}
        self._read_before([s for s in self.stored if s in blind])

    def _elsewhere(self, name: str, line: int | None) -> Refusal:
        message = f"`{name}` is written and read at different addresses by one kernel"
        return Refusal("in-place access", message, "Write the result to its own buffer.", line)

    def _check_place(self, store: Store, offset: Node, region: Region) -> None:
        """Refuse a store whose load, at its address, may see it in another step or under other conditions."""
        name = store.base.attrs["name"]
        loops = [r for r in store.region.chain() if r.is_loop and region.inside(r)]
        if any(not offset.home.inside(loop) for loop in loops):
            message = f"`{name}` is written and read at one address in every step of a loop"
            remedy = "Carry the value in a variable, and store it after the loop."
            raise Refusal("in-place access", message, remedy, store.line)
        if _branches(store.region) != _branches(region):
            message = f"`{name}` is read in one branch and written in another, or in none"
            remedy = "Load and store it under the same conditions, or write to a buffer of its own."
            raise Refusal("in-place access", message, remedy, store.line)

    def read_before(self, name: str) -> None:
        """Let every store to a buffer read it first, to no avail: what it overwrites has the gradient 0."""
        self._read_before([s for s in self.stored if s.base.attrs["name"] == name])
        self.inplace.add(name)

    def _read_before(self, stores: list[Store]) -> None:
        g = self.g
        for store in stores:
            store.base.active = True
            args = [n for n in (store.base, store.offset, store.mask) if n is not None]
            args += [g.number(0)] * (store.mask is not None)
            with g.at(store.region):
                attrs = {"other": store.mask is not None}
                old = g.make("load", args, attrs, language.element(store.base), store.offset.shape)
                old.active = True
                store.value = g.make("over", (store.value, old), {}, store.value.dtype, store.value.shape)
            self.inplace.add(store.base.attrs["name"])

    # statements

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

    # if

    def branch(self, node: ast.If, body: list[ast.stmt], orelse: list[ast.stmt]) -> Returned | None:
        cond = self.expr(node.test)
        known = self.literal(cond)
        if known is not None:
            return self.block(body if known else orelse)
        before, outer_effects, g = self.env, self.effects, self.g
        taken, marks = self.decided(cond), (len(self.stored), len(self.loaded))
        untaken = node.orelse if taken else node.body
        if taken is not None and untaken:
            g.untaken[node.lineno] = range(untaken[0].lineno, (untaken[-1].end_lineno or 0) + 1)
            if node.lineno in self.folds:
                g.folded[cond] = taken, node.lineno
                return self.block(body if taken else orelse)
        stmt = g.fork(cond, is_static(cond), node.lineno)
        found = []
        for region, statements, effects in (
            (stmt.then, body, stmt.then_effects),
            (stmt.other, orelse, stmt.other_effects),
        ):
            self.env, self.effects = dict(before), effects
            begun = len(self.stored), len(self.loaded)
            try:
                with g.at(region):
                    found.append((self.block(statements), self.env))
            except Refusal:
                if taken is None or taken is (region is stmt.then):
                    raise
                del self.stored[begun[0] :], self.loaded[begun[1] :]
                if self.with_tensors(region, statements, effects, before, found):
                    continue
                self.env, self.effects = before, outer_effects
                del self.stored[marks[0] :], self.loaded[marks[1] :]
                g.folded[cond] = taken, node.lineno
                return self.block(body if taken else orelse)
        (one, then), (two, other) = found
        if taken is not None and one is two is None:
            self.effects = stmt.other_effects if taken else stmt.then_effects
            if taken:
                other = self.with_numbers(stmt.other, orelse, self.effects, before, then, other) or other
            else:
                then = self.with_numbers(stmt.then, body, self.effects, before, other, then) or then
        self.env, self.effects = before, outer_effects
        self.effects.append(stmt)
        for name in {**then, **other}:
            self.env[name] = self.merge(stmt, then.get(name), other.get(name), name)
        if one is None and two is None:
            return None
        return Returned(self.merge(stmt, one and one.value, two and two.value, "returned"))

    def with_tensors(
        self, region: Region, statements: list[ast.stmt], effects: list, before: dict, found: list
    ) -> bool:
        """Read a branch that the traced call does not take once more, with tensors of integers for what are
        integers there: `seqlen_offsets` may be either. Whether that went well."""
        given = {n: v for n, v in before.items() if n in self.args and self.args[n].kind == "int"}
        numbers = {n: v for n, v in given.items() if isinstance(v, Node) and v.op == "param"}
        tensors = {n: self._param(Arg(n, "pointer", None, "int64")) for n in numbers}
        pointers = {n: Ptr(node, self.g.const(0)) for n, node in tensors.items()}
        marks = len(self.stored), len(self.loaded)
        effects.clear()
        self.env = {**before, **pointers}
        try:
            with self.g.at(region):
                returned = self.block(statements)
        except Refusal:
            return False
        used = {base.attrs["name"] for base, *_ in self.loaded[marks[1] :] if base in tensors.values()}
        if not used or any(store.base in tensors.values() for store in self.stored[marks[0] :]):
            return False
        self.either |= used
        found.append((returned, {**self.env, **numbers}))
        return True

    def with_numbers(
        self, region: Region, statements: list[ast.stmt], effects: list, before: dict, kept: dict, own: dict
    ) -> dict | None:
        """The same for a branch that has numbers for what are tensors of integers in the traced call: what
        it assigns is a pointer then, and a number in the other branch (`kept`)."""
        moved = [v.base for n, v in own.items() if isinstance(v, Ptr) and isinstance(kept.get(n), Node)]
        names = {b.attrs["name"] for b in moved if b.op == "param" and not b.active}
        swapped = {n for n in names if (self.args[n].dtype or "").startswith(("int", "uint")) and n in before}
        if not swapped or effects:
            return None
        numbers = {n: self.g.intern("param", (), {"name": n, "traced": None}, "int32", ()) for n in swapped}
        marks = len(self.stored), len(self.loaded)
        self.env = {**before, **numbers}
        try:
            with self.g.at(region):
                returned = self.block(statements)
        except Refusal:
            returned = Returned(None)
        if returned is not None or len(self.loaded) > marks[1] or effects:
            del self.stored[marks[0] :], self.loaded[marks[1] :]
            effects.clear()
            return None
        self.either |= swapped
        return {**self.env, **{n: before[n] for n in swapped}}

    def merge(self, stmt: If, a: Any, b: Any, name: str) -> Any:
        """The value of a name after both branches."""
        if a is b or (not isinstance(a, Node) and type(a) is type(b) and a == b):
            return a
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self.merge(stmt, x, y, name) for x, y in zip(a, b, strict=True))
        if is_static(stmt.cond) and _differ(self.g, a, b):
            return Either(stmt.cond, self.alone(stmt, a, True, name), self.alone(stmt, b, False, name))
        if isinstance(a, Ptr) and isinstance(b, Ptr) and a.base is b.base:
            return Ptr(a.base, self.merge(stmt, a.offset, b.offset, offset_name(name)))
        if isinstance(a, BlockPtr) and isinstance(b, BlockPtr) and a.base is b.base and a.block == b.block:
            pairs = zip(self.leaves(a), self.leaves(b), strict=True)
            return self.rebuild(a, [self.merge(stmt, x, y, name) for x, y in pairs])
        if a is None or b is None:  # made in one branch only: it may be used under the same condition
            some = a if a is not None else b
            if isinstance(some, Ptr):
                first, second = (some.offset, None) if b is None else (None, some.offset)
                return Ptr(some.base, self.merge(stmt, first, second, name))
            if not isinstance(some, Node):
                return Poison(f"`{name}` is assigned in one branch only")
        nodes = [x if x is None else self.try_node(x) for x in (a, b)]
        if any(n is None and x is not None for n, x in zip(nodes, (a, b), strict=True)):
            return Poison(f"`{name}` is a different kind of thing in the two branches")
        present = [n for n in nodes if n is not None]
        shape = broadcast_shape(self.g, [n.shape for n in present])
        for i, (n, region) in enumerate(zip(nodes, (stmt.then, stmt.other), strict=True)):
            if n is not None and n.shape != shape:
                with self.g.at(region):
                    nodes[i] = self.g.broadcast(n, shape)
        dtype = promote([n for n in nodes if n is not None])
        attrs = {"then": nodes[0], "other": nodes[1], "if": stmt}
        out = self.g.fresh("ifout", attrs, dtype, shape, self.g.here, (stmt.cond,))
        out.active = any(n.active for n in present)
        out.hint, out.line = name, stmt.line
        out.attrs["weak"] = all(n.weak for n in present)
        stmt.outs.append(out)
        return out

    def alone(self, stmt: If, value: Any, first: bool, name: str) -> Any:
        """The value that a name has after one branch, for where it is known that this one was taken."""
        if isinstance(value, Either):
            then = self.alone(stmt, value.then, first, name)
            return Either(value.cond, then, self.alone(stmt, value.other, first, name))
        if value is None or isinstance(value, Poison):
            return value or Poison(f"`{name}` is assigned in one branch only")
        node = value.offset if isinstance(value, Ptr) else value
        if isinstance(node, Node) and node.op == "ifout" and is_static(node.args[0]):
            node.attrs["named"] = True  # the generated code names it in both branches
        return self.merge(stmt, value, None, name) if first else self.merge(stmt, None, value, name)

    # loops

    def loop(self, node: ast.For) -> None:
        if not isinstance(node.target, ast.Name):
            raise Refusal("loop target", "a loop needs one plain variable").at(node)
        lo, hi, step, call = self.range(node.iter)
        if self.whole is not None and step.op == "constexpr" and step.attrs["name"] == self.whole:
            self.env[node.target.id] = lo
            self.block(node.body)
            return
        g, first, stride = self.g, lo, step
        downwards = step.op == "const" and step.value < 0
        start = g.concrete(lo)
        moved = downwards or isinstance(start, int) and start < 0
        if moved:  # nothing after this has to know of loops that count down, or from below zero
            lo, hi, step = g.const(0), self.trips(lo, hi, step), g.one
        region = g.loop_region(lo, hi, step, call, node.lineno)
        iv = region.iv
        assert iv is not None
        if iv.hint is None:
            iv.hint = "step" if moved else node.target.id
        zero_based = is_zero(lo) and is_number(step, 1)
        with g.at(region):
            count = iv if zero_based else g.make("floordiv", (g.sub(iv, lo), step))
            index = g.add(first, g.mul(iv, stride)) if moved else iv
            if moved and index.hint is None:
                index.hint = node.target.id
        trips = g.make("maximum", (hi if zero_based else self.trips(lo, hi, step), g.const(0)))
        self.iterate(node, region, None, (count, trips, step, lo), {node.target.id: index})

    def trips(self, lo: Node, hi: Node, step: Node) -> Node:
        """How many steps there are from lo to hi; of a step below zero, whose value is known, too."""
        g = self.g
        if step.op == "const" and step.value < 0:
            lo, hi, step = hi, lo, g.const(-step.value)
        span = g.sub(hi, lo)
        if lo.op == "const" and hi.op == "sub" and hi.args[1].op == "const":  # T - 1 down to -1
            left = hi.args[1].value + lo.value
            span = g.sub(hi.args[0], g.const(left)) if left else hi.args[0]
        if hi.op == "const" and lo.op == "sub" and lo.args[0].op == "const":  # 1 - W up to 1
            span = g.add(lo.args[1], g.const(hi.value - lo.args[0].value))
        return span if is_number(step, 1) else g.make("cdiv", (span, step), dtype=promote((hi, lo, step)))

    def while_loop(self, node: ast.While) -> None:
        found = counted(node)
        if found is not None and isinstance(self.try_node(self.env.get(found[0])), Node):
            name, high, step, body = found
            bounds = [ast.Name(name, ast.Load()), high, step]
            call = ast.Call(ast.Name("range", ast.Load()), bounds, [])
            loop = ast.copy_location(ast.For(ast.Name(name, ast.Store()), call, body, []), node)
            lo, hi, stride, _ = self.range(ast.fix_missing_locations(loop).iter)
            if not lo.is_float and not hi.is_float:
                self.loop(loop)
                g = self.g
                trips = g.make("maximum", (self.trips(lo, hi, stride), g.const(0)))
                self.env[name] = g.add(lo, g.mul(trips, stride))
                return
        self.iterate(node, self.g.while_region(node.lineno), node.test, None, {})

    def range(self, node: ast.expr) -> tuple[Node, Node, Node, str]:
        if not isinstance(node, ast.Call):
            raise Refusal("loop", "only loops over a range are supported", "Count: for i in range(...).").at(
                node
            )
        function = self.expr(node.func)
        name = getattr(function, "__name__", str(function))
        if name not in ("range", "static_range"):
            raise Refusal(
                f"loop over {name}", "only loops over a range are supported", "Count: for i in range(...)."
            ).at(node)
        bounds = [self.node(self.expr(a)) for a in node.args]
        if len(bounds) == 1:
            bounds = [self.g.const(0), *bounds]
        lo, hi, step = bounds if len(bounds) > 2 else (*bounds, self.g.one)
        return lo, hi, step, f"{self.tl}.static_range" if name == "static_range" else "range"

    def iterate(
        self, node: Any, region: Region, test: ast.expr | None, affine: tuple | None, extra: dict
    ) -> None:
        """Interpret a body until its carries are known, then keep that version."""
        g, outer, before, effects = self.g, self.g.here, self.env, self.effects
        assigned = [n for n in dict.fromkeys(assigned_names(node.body)) if n in before and n not in extra]
        entry = {name: self.leaves(before[name]) for name in assigned}
        plan: dict[tuple[str, int], tuple] = {
            (name, i): ("phi", leaf.dtype, leaf.shape, leaf.active, leaf.weak)
            for name in assigned
            for i, leaf in enumerate(entry[name])
        }
        marks = len(self.stored), len(self.loaded)
        for _ in range(12):
            del self.stored[marks[0] :], self.loaded[marks[1] :]
            loop = For(region, outer, line=node.lineno)
            g.here, self.effects, self.env = region, loop.effects, {**before, **extra}
            current = {key: self._carried(region, key, how, entry) for key, how in plan.items()}
            for name in assigned:
                parts = [current[name, i] for i in range(len(entry[name]))]
                self.env[name] = self.rebuild(before[name], parts)
            if test is not None:
                loop.cond = self.node(self.expr(test))
            if self.block(node.body) is not None:
                raise Refusal("return in a loop", "a return inside a loop is not supported").at(node)
            turned = next((n for n in assigned if bases(self.env[n]) != bases(before[n])), None)
            self._same_blocks(node, before, assigned)
            if turned is not None:
                message = f"`{turned}` points into another buffer after a step"
                raise Refusal("pointer", message, "Load from each buffer apart.").at(node)
            revised = self._revise(plan, current, entry, affine, region)
            if revised == plan:
                break
            plan = revised
        else:
            raise Refusal("loop", "the types of the values carried by this loop do not settle").at(node)
        after = self.env
        g.here, self.effects, self.env = outer, effects, {**before}
        for name in assigned:
            leaves = zip(entry[name], self.leaves(after[name]), strict=False)
            results = [
                self._after(loop, plan[name, i], current[name, i], init, out, affine)
                for i, (init, out) in enumerate(leaves)
            ]
            self.env[name] = self.rebuild(before[name], results)
        for name in (name for name in after if name not in before):
            self.env[name] = Poison(f"`{name}` is assigned only inside a loop and used after it")
        effects.append(loop)

    def _same_blocks(self, node: Any, before: dict, assigned: list[str]) -> None:
        for name in assigned:
            a, b = before[name], self.env[name]
            if isinstance(a, BlockPtr) and isinstance(b, BlockPtr) and a.block != b.block:
                message = f"`{name}` points to blocks of another shape after a step"
                raise Refusal("pointer", message, "Give the block pointer in the loop another name.").at(node)

    def _carried(self, region: Region, key: tuple, how: tuple, entry: dict) -> Node:
        name, i = key
        init = entry[name][i]
        if how[0] == "same":
            return init
        if how[0] == "closed":
            _, step, scale = how
            return self.g.add(init, self.g.mul(step, scale))
        _, dtype, shape, active, _ = how
        phi = self.g.fresh("phi", {"name": name}, dtype, shape, region)
        phi.active, phi.hint = active, name
        return phi

    def _revise(self, plan: dict, current: dict, entry: dict, affine: tuple | None, region: Region) -> dict:
        """How each leaf is carried, judged from one pass over the body."""
        revised = {}
        for key, how in plan.items():
            name, i = key
            init, phi = entry[name][i], current[key]
            leaves = self.leaves(self.env[name])
            if i >= len(leaves):
                raise Refusal(
                    "loop", f"`{name}` changes its kind inside the loop", "Give the other value another name."
                )
            out = leaves[i]
            if how[0] in ("same", "closed") or out is phi or out is init:
                revised[key] = ("same",) if how[0] == "phi" else how
                continue
            step = step_of(self.g, phi, out) if affine is not None and not out.is_float else None
            if affine is not None and step is not None and not step.home.inside(region):
                revised[key] = ("closed", *self._scaled(step, affine))
                continue
            if not init.weak:
                dtype = init.dtype
            elif out.weak:
                dtype = promote((init, out))
            else:  # a Python number takes the type of what it becomes
                dtype = out.dtype if out.is_float or not init.is_float else init.dtype
            shape = max(init.shape, out.shape, key=len)
            revised[key] = ("phi", dtype, shape, out.active or init.active, out.weak and init.weak)
        return revised

    def _scaled(self, step: Node, affine: tuple) -> tuple[Node, Node]:
        """`step * iteration`, by way of the loop variable where the step is a multiple of the loop's."""
        count, _, loop_step, _lo = affine
        with self.g.at(count.home):
            rest = None if is_number(loop_step, 1) else quotient(self.g, step, loop_step)
        return (rest, count.args[0]) if rest is not None and count.op == "floordiv" else (step, count)

    def _after(self, loop: For, how: tuple, phi: Node, init: Node, out: Node, affine: tuple | None) -> Node:
        """A leaf after the loop."""
        g = self.g
        if how[0] == "same":
            return init
        if how[0] == "closed":
            count, trips, loop_step, _ = affine  # type: ignore[misc]
            _, step, scale = how
            return g.add(init, g.mul(step, trips if scale is count else g.mul(trips, loop_step)))
        if init.shape != phi.shape:
            init = g.broadcast(init, phi.shape)
        if out.shape != phi.shape:
            with g.at(loop.region):
                out = g.broadcast(out, phi.shape)
        loop.carries.append(Carry(phi, init, out))
        return loop_out(g, loop, len(loop.carries) - 1)

    # values

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
            raise Refusal(value.construct, value.why)
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

    # expressions

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
                raise Refusal(value.construct, value.why)
            return value
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
        if b is not None or not (pointer or (isinstance(a, Node) and a.op == "constexpr")):
            return (a is b) != negate
        none = a.base.attrs["none"] if pointer else a.value is None
        found = self.g.make("isnone", (a.base if pointer else a,), {"none": none}, "int1", ())
        return self.g.make("not", (found,), {}, "int1") if negate else found

    def _ifexp(self, node: ast.IfExp) -> Any:
        cond = self.expr(node.test)
        known = self.literal(cond)
        if known is not None:
            return self.expr(node.body if known else node.orelse)
        stmt = self.g.fork(cond, is_static(cond), node.lineno)
        with self.g.at(stmt.then):
            then = self.expr(node.body)
        with self.g.at(stmt.other):
            other = self.expr(node.orelse)
        self.effects.append(stmt)
        result = self.merge(stmt, then, other, "value")
        if isinstance(result, Node) and result.op == "ifout":
            result.hint = None
        return result

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self.expr(node.value)
        if isinstance(value, (Node, Ptr, BlockPtr, DType, PtrType)):
            return language.attribute(self, value, node.attr)
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

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            raise Refusal("starred call", "starred arguments are not supported in a kernel").at(node)
        owner = self.expr(node.func.value) if isinstance(node.func, ast.Attribute) else None
        method = isinstance(owner, (Node, Ptr, BlockPtr))
        function = None if method else self.expr(node.func)
        args = [self.expr(a) for a in node.args]
        keywords: dict = {k.arg: self.expr(k.value) for k in node.keywords}
        if method:
            return language.method(self, owner, node.func.attr, args, keywords)  # type: ignore[attr-defined]
        helper = self.functions.get(getattr(function, "__name__", "")) if is_helper(function) else None
        if helper is not None and self._is_ours(function):
            return self.inline(helper, args, keywords)
        self.g.line = node.lineno
        imported = self._source_of(function, node.lineno)
        if imported is not None:
            return self.inline_imported(function, imported, args, keywords)
        return language.call(self, function, self._text_of(function, node.func), args, keywords)

    def _text_of(self, function: Any, spelled: ast.expr) -> str:
        """How the generated code, which stands in the kernel's own file, calls a function of Triton."""
        name, home = getattr(function, "__name__", ""), getattr(function, "__module__", "") or ""
        if isinstance(self.module, ModuleType) and not self._renamed(function, spelled):
            return ast.unparse(spelled)
        if not home.startswith("triton.language"):
            return ast.unparse(spelled)
        if home.startswith("triton.language.extra."):
            return f"{self.tl}.extra.libdevice.{name}"
        return f"{self.tl}.{name}" if hasattr(tl, name) else f"{self.tl}.math.{name}"

    def _renamed(self, function: Any, spelled: ast.expr) -> bool:
        """Whether a function of triton.language is called by a name that another module gave it."""
        if isinstance(spelled, ast.Name):
            return getattr(tl, getattr(function, "__name__", ""), None) is function
        root = spelled
        while isinstance(root, ast.Attribute):
            root = root.value
        owner = vars(self.module).get(root.id) if isinstance(root, ast.Name) else None
        return isinstance(owner, ModuleType) and not owner.__name__.startswith("triton")

    def _is_ours(self, function: Any) -> bool:
        """Whether a helper is one of the kernel's own file, and no namesake of one."""
        home = function.fn.__globals__.get("__name__")
        return isinstance(self.module, ModuleType) and home == vars(self.module).get("__name__")

    def _source_of(self, function: Any, line: int) -> ast.FunctionDef | None:
        """A helper from another module, as if it stood on the line of its call; None for what is none, has a
        rule of its own, or no source that can be read."""
        if not is_helper(function) or getattr(function, "__name__", "") in language.USER_RULES:
            return None
        try:
            helper = ast.parse(textwrap.dedent(inspect.getsource(function.fn))).body[0]
        except (OSError, SyntaxError, TypeError):
            return None
        for node in ast.walk(helper):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = line  # type: ignore[attr-defined]
        return helper if isinstance(helper, ast.FunctionDef) else None

    def inline_imported(self, function: Any, helper: ast.FunctionDef, args: list, keywords: dict) -> Any:
        """The same as inline(), in the other module, whose names are the helper's."""
        outer = self.module
        self.module = SimpleNamespace(**function.fn.__globals__)
        try:
            return self.inline(helper, args, keywords)
        finally:
            self.module = outer

    def inline(self, helper: ast.FunctionDef, args: list, keywords: dict) -> Any:
        """Interpret a helper's body in its own scope."""
        if self.depth > 16:
            raise Refusal("recursion", f"`{helper.name}` calls itself")
        syntax_check.check(helper)
        names = [a.arg for a in helper.args.args]
        scope = dict(zip(names, args, strict=False))
        scope.update(keywords)
        for name, default in zip(reversed(names), reversed(helper.args.defaults), strict=False):
            if name not in scope:
                scope[name] = self.expr(default)
        missing = [name for name in names if name not in scope]
        if missing:
            raise Refusal("call", f"`{helper.name}` is called without {', '.join(missing)}")
        outer, self.env, line = self.env, scope, self.g.line
        self.depth += 1
        try:
            with self.g.at(self.g.here):
                done = self.block(helper.body)
        finally:
            self.env, self.g.line = outer, line
            self.depth -= 1
        return done.value if done is not None else None


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


def _differ(g: Graph, a: Any, b: Any) -> bool:
    """Whether two values of a name are blocks, or pointers to blocks, of shapes that do not stretch."""
    if isinstance(a, Either) or isinstance(b, Either):
        return True
    parts = [value.offset if isinstance(value, Ptr) else value for value in (a, b)]
    if type(a) is not type(b) or not all(isinstance(part, Node) and part.shape for part in parts):
        return False
    one, two = ([g.concrete(dim) for dim in part.shape] for part in parts)
    return len(one) != len(two) or any(x != y and 1 not in (x, y) for x, y in zip(one, two, strict=True))

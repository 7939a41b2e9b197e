"""Branches of a kernel: both sides are interpreted, and what each leaves in a name is merged."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from ..ir.graph import Graph, broadcast_shape, promote
from ..ir.nodes import If, Node, Region
from ..ir.refusal import Refusal
from ..ir.values import Arg, BlockPtr, DType, Either, Poison, Ptr, Returned, is_static, offset_name
from .calls import Calls


class Branches(Calls):
    """Interprets `if`."""

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
            value = self.merge(stmt, then.get(name), other.get(name), name)
            if isinstance(value, Poison) and value.fold is None and taken is not None and untaken:
                value = replace(value, fold=node.lineno)
            self.env[name] = value
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
        if isinstance(a, Poison) or isinstance(b, Poison):
            return a if isinstance(a, Poison) else b
        if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
            return tuple(self.merge(stmt, x, y, name) for x, y in zip(a, b, strict=True))
        if is_static(stmt.cond) and isinstance(a, DType) and isinstance(b, DType):
            wide = _wider(a, b)
            if wide is not None:
                return wide
        if is_static(stmt.cond) and _differ(self.g, a, b):
            return Either(stmt.cond, self.alone(stmt, a, True, name), self.alone(stmt, b, False, name))
        if isinstance(a, Ptr) and isinstance(b, Ptr) and a.base is b.base:
            return Ptr(a.base, self.merge(stmt, a.offset, b.offset, offset_name(name)))
        if isinstance(a, Ptr) and isinstance(b, Ptr):
            message = f"`{name}` points into another buffer after each of the two branches"
            return Poison(message, "branch-dependent pointer")
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


def _wider(a: DType, b: DType) -> DType | None:
    """Of a type by name and a tensor's own, which a branch on that chooses between (float32 to compute in,
    unless the tensor has more), the one that holds the other's values, as the tensor is now."""
    own = next((t for t in (a, b) if t.name.startswith("$")), None)
    other = b if own is a else a
    if own is None or other.name != "float32":
        return None
    return own if own.name.startswith("$float64") else other


def _differ(g: Graph, a: Any, b: Any) -> bool:
    """Whether two values of a name are blocks, or pointers to blocks, of shapes that do not stretch."""
    if isinstance(a, Either) or isinstance(b, Either):
        return True
    parts = [value.offset if isinstance(value, Ptr) else value for value in (a, b)]
    if type(a) is not type(b) or not all(isinstance(part, Node) and part.shape for part in parts):
        return False
    one, two = ([g.concrete(dim) for dim in part.shape] for part in parts)
    return len(one) != len(two) or any(x != y and 1 not in (x, y) for x, y in zip(one, two, strict=True))

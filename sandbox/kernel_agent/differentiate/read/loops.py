"""Loops of a kernel: their carries, found by interpreting a body until their list and types are stable. An
integer that steps by an invariant is replaced by its closed form at once (loop class A).
"""

from __future__ import annotations

import ast
from itertools import chain
from typing import Any

from ...source import tree_nodes
from ..ir.graph import promote
from ..ir.nodes import Carry, For, Node, Region, nodes_in
from ..ir.nonnegative import natural
from ..ir.refusal import Refusal
from ..ir.simplify import is_number, is_zero
from ..ir.values import (
    BlockPtr,
    Poison,
    assigned_names,
    bases,
    counted,
    is_static,
    loop_out,
    quotient,
    step_of,
)
from . import last_steps
from .branches import Branches

UNROLLED = 4  # steps that may each be read apart


class Loops(Branches):
    """Interprets `for` and `while`."""

    def loop(self, node: ast.For) -> None:
        if not isinstance(node.target, ast.Name):
            raise Refusal("loop target", "a loop needs one plain variable").at(node)
        variable = node.target.id
        lo, hi, step, call = self.range(node.iter)
        if self.whole is not None and step.op == "constexpr" and step.attrs["name"] == self.whole:
            self.env[variable] = lo
            self.block(node.body)
            return
        upwards = isinstance(size := self.g.concrete(step), int) and size > 0 and is_static(step)
        known = [name for name, value in self.env.items() if not isinstance(value, Poison)]
        found = last_steps.behind(node, self.tl, known) if upwards else None
        if found is not None:
            node, last = found
        elif self.unrolled(node, lo, hi, step):
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
            iv.hint = "step" if moved else variable
        zero_based = is_zero(lo) and is_number(step, 1)
        with g.at(region):
            count = iv if zero_based else g.make("floordiv", (g.sub(iv, lo), step))
            index = g.add(first, g.mul(iv, stride)) if moved else iv
            if moved and index.hint is None:
                index.hint = variable
        if zero_based and not moved and found is None and self.whole is None:
            self.plain.append(node)
        trips = g.make("maximum", (hi if zero_based else self.trips(lo, hi, step), g.const(0)))
        self.iterate(node, region, None, (count, trips, step, lo), {variable: index})
        if found is not None:
            self.block([last])

    def unrolled(self, node: ast.For, lo: Node, hi: Node, step: Node) -> bool:
        """Interpret a body once a step, where there are few and some store what others do not: `if turn == 1`
        in a loop over two passes. Whether that was so."""
        if not all(bound.op == "const" for bound in (lo, hi, step)):
            return False
        steps = range(lo.value, hi.value, step.value)
        name = node.target.id  # type: ignore[attr-defined]
        branches = [n for n in tree_nodes(node) if isinstance(n, ast.If) and _stores(n)]
        asked = [{n.id for n in tree_nodes(branch.test) if isinstance(n, ast.Name)} for branch in branches]
        if len(steps) > UNROLLED or {name} not in asked or name in assigned_names(node.body):
            return False
        for value in steps:
            self.env[name] = self.g.const(value)
            self._body(node)
        return True

    def _body(self, node: ast.For | ast.While) -> None:
        if self.block(node.body) is not None:
            raise Refusal("return in a loop", "a return inside a loop is not supported").at(node)

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
            name, high, step, body, least = found
            first = ast.Name(name, ast.Load())
            if least is not None:  # no step, where the first is below that
                asked = ast.Compare(first, [ast.GtE()], [least])
                where = ast.Attribute(ast.Name(self.tl, ast.Load()), "where", ast.Load())
                high = ast.Call(where, [asked, high, first], [])
            bounds = [first, high, step]
            call = ast.Call(ast.Name("range", ast.Load()), bounds, [])
            loop = ast.copy_location(ast.For(ast.Name(name, ast.Store()), call, body, []), node)
            lo, hi, stride, _ = self.range(ast.fix_missing_locations(loop).iter)
            if not lo.is_float and not hi.is_float and (least is None or natural(stride)):
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
        inside = [n for n in dict.fromkeys(assigned_names(node.body)) if n not in extra]
        assigned = [n for n in inside if n in before and not isinstance(before[n], Poison)]
        entry = {name: self.leaves(before[name]) for name in assigned}
        for leaf in chain.from_iterable(entry.values()):
            self._complete(leaf)
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
            self._body(node)
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
        made = {*inside, *(after.keys() - before.keys())} - set(assigned)
        for name in (name for name in after if name in made):
            self.env[name] = Poison(f"`{name}` is assigned only inside a loop and used after it")
        effects.append(loop)

    def _complete(self, leaf: Node) -> None:
        """What one branch alone makes, and a loop goes on with, is 0 after the other: the loop's text begins
        with it on both sides, though nothing reads it there."""
        if leaf.op != "ifout":
            return
        stmt, sides = leaf.attrs["if"], {"then": leaf.attrs["then"], "other": leaf.attrs["other"]}
        for side, value in sides.items():
            if value is not None:
                self._complete(value)
                continue
            leaf.attrs["alone"] = "then" if side == "other" else "other"
            with self.g.at(stmt.then if side == "then" else stmt.other):
                leaf.attrs[side] = self.g.zeros(leaf.shape, leaf.dtype)

    def _step(self, init: Node, phi: Node, out: Node) -> Node | None:
        """What a step adds; to what one side of a flag alone begins with, what it adds there."""
        side = init.attrs.get("alone") if init.op == out.op == "ifout" else None
        if side is not None and is_static(init.args[0]) and out.args[0] is init.args[0]:
            out = out.attrs[side]
        step = step_of(self.g, phi, out)
        given = step is not None and all(isinstance(n.attrs.get("traced", 0), int) for n in nodes_in([step]))
        return self._before(step, phi.home) if step is not None and side is not None and given else step

    def _before(self, step: Node, region: Region) -> Node:
        """A sum or product of numbers that a branch of a loop computes, computed before the loop."""
        if step.op not in ("add", "sub", "mul", "neg"):
            return step
        with self.g.at(region.parent or self.g.top):
            return self.g.again(step, [self._before(arg, region) for arg in step.args], upstream=False)

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
            step = self._step(init, phi, out) if affine is not None and not out.is_float else None
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


def _stores(branch: ast.If) -> bool:
    calls = [n.func for n in tree_nodes(branch) if isinstance(n, ast.Call)]
    return any(isinstance(f, ast.Attribute) and f.attr == "store" for f in calls)

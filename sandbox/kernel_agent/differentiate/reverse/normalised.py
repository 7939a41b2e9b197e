"""Sums that each step of a loop divides by another sum, as the first flash attention does.

`acc = acc * (l / l_new) + x / l_new` holds `total / l` for `total = total + x`: the loop carries `total`
instead, and what comes after it divides once. Then neither has a factor that the other makes, and the running
maximum of both may be taken out (`running_maxima`). Where the loop has no steps the quotient is 0, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.nodes import Carry, For, Node, nodes_in
from ..ir.report import LineReport
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import Kernel, loop_out
from .running_maxima import prune


@dataclass(frozen=True)
class Quotient:
    """A carry that holds a sum divided by another carry, which lies along an axis of it, or is a number."""

    divisor: int
    axis: int | None
    step: Node  # the next sum, with the carry for the last one


def undivide(kernel: Kernel, report: list[LineReport]) -> None:
    """Let loops carry sums in place of such quotients."""
    prune(kernel.effects)
    loops = dict.fromkeys(n.attrs["loop"] for n in nodes_in(kernel.effects) if n.op == "loopout")
    found = {loop: quotients for loop in loops if (quotients := _quotients(kernel.graph, loop))}
    if found:
        Sums(kernel, found).run()
    for loop in found:
        reason = "what each step divides by a sum is divided once, after the loop"
        report.append(LineReport(loop.line, "B", "linearity", reason))


class Sums:
    """Rewrites a kernel so that its loops carry sums."""

    def __init__(self, kernel: Kernel, found: dict[For, dict[int, Quotient]]) -> None:
        self.kernel, self.g, self.found = kernel, kernel.graph, found
        self.made: dict[For, For] = {}

    def run(self) -> None:
        self.kernel.effects = Rewriter(self.g, self.lookup).effects(self.kernel.effects)

    def lookup(self, node: Node) -> Node | None:
        old = node.attrs["loop"] if node.op == "loopout" else None
        if old not in self.found:
            return None
        with self.g.at(old.outer):
            value = self.after(old, node.attrs["index"])
        self.kernel.equal[value] = node
        return value

    def after(self, old: For, k: int) -> Node:
        """A result of such a loop."""
        g, new, quotient = self.g, self.loop(old), self.found[old].get(k)
        out = loop_out(g, new, k)
        if quotient is None:
            return out
        divisor = loop_out(g, new, quotient.divisor)
        for axis in range(len(out.shape)):
            if quotient.axis is not None and axis != quotient.axis:
                divisor = g.expand(divisor, axis)
        return g.where(g.compare("==", divisor, g.number(0)), g.number(0), g.div(out, divisor))

    def loop(self, old: For) -> For:
        if old in self.made:
            return self.made[old]
        new = self.made[old] = For(old.region, old.outer, line=old.line)
        phis = {carry.phi: self.g.twin(carry.phi, old.region) for carry in old.carries}
        body = Rewriter(self.g, lambda n: phis.get(n) or self.lookup(n))
        for k, carry in enumerate(old.carries):
            quotient = self.found[old].get(k)
            step = carry.next if quotient is None else quotient.step
            assert step is not None
            new.carries.append(Carry(phis[carry.phi], body.node(carry.init), body.node(step)))
        return new


def _quotients(g: Graph, loop: For) -> dict[int, Quotient]:
    found: dict[int, Quotient] = {}
    if loop.effects or loop.region.kind != "for":
        return found
    for k, carry in enumerate(loop.carries):
        others = [c.next for c in loop.carries if c is not carry]
        if not carry.phi.is_float or not is_zero(carry.init) or carry.phi in set(nodes_in(others)):
            continue
        for j, divisor in enumerate(loop.carries):
            if j == k or not divisor.phi.is_float or len(divisor.phi.shape) > 1:
                continue
            for axis in range(len(carry.phi.shape)) if divisor.phi.shape else (None,):
                with g.at(loop.region):
                    step = _step(g, carry, divisor, axis)
                if step is not None:
                    found[k] = Quotient(j, axis, step)
    return {k: quotient for k, quotient in found.items() if quotient.divisor not in found}


def _step(g: Graph, carry: Carry, divisor: Carry, axis: int | None) -> Node | None:
    """The next sum in terms of the last one, for which the carry stands; None where it is no quotient."""
    assert carry.next is not None and divisor.next is not None
    total = Factor(g, divisor.next, axis).cancelled(carry.next)
    if total is None or total.op != "add":
        return None
    kept = [part for part in total.args if carry.phi in set(nodes_in([part]))]
    if len(kept) != 1 or not _once(kept[0], carry.phi):
        return None
    last = Factor(g, divisor.phi, axis).left_out(kept[0])
    (new,) = (part for part in total.args if part is not kept[0])
    return None if last is None else g.add(last, new)


def _once(product: Node, phi: Node) -> bool:
    """Whether a product has a carry as one of its factors, and nowhere else."""
    while product is not phi:
        holds = [phi in set(nodes_in([arg])) for arg in product.args]
        if product.op not in ("mul", "div") or sum(holds) != 1 or (product.op == "div" and holds[1]):
            return False
        product = product.args[holds.index(True)]
    return True


@dataclass(frozen=True)
class Factor:
    """A number, or one for each place along an axis, that blocks are divided by or multiplied with."""

    g: Graph
    factor: Node
    axis: int | None

    def cancelled(self, node: Node) -> Node | None:
        """The value times the factor, where a division by it can be left out for that."""
        if node.op == "div" and self.is_spread(node.args[1]):
            above = node.args[0]
            return above if above.shape == node.shape else self.g.broadcast(above, node.shape)
        if is_zero(node):
            return node
        if node.op == "add":
            parts = [part for arg in node.args if (part := self.cancelled(arg)) is not None]
            return self.g.again(node, parts) if len(parts) == 2 else None
        return self._within(node, Factor.cancelled)

    def left_out(self, node: Node) -> Node | None:
        """The value without the factor."""
        if self.is_spread(node):
            return self.g.const(1.0, node.dtype, node.shape)
        return self._within(node, Factor.left_out)

    def _within(self, node: Node, change: Callable[[Factor, Node], Node | None]) -> Node | None:
        """The same operation with one argument changed: in a product either will do."""
        places = self._places(node)
        inner = self._beneath(node) if node.op == "expand" else self
        for at in places:
            arg = node.args[at]
            aligned = self.axis is None or node.op == "expand" or len(arg.shape) == len(node.shape)
            changed = change(inner, arg) if inner is not None and aligned else None
            if changed is not None:
                return self.g.again(node, [changed if i == at else a for i, a in enumerate(node.args)])
        return None

    def _places(self, node: Node) -> tuple[int, ...]:
        """Which arguments of an operation hold a factor of its result."""
        if node.op == "mul" or (node.op == "dot" and self.axis is None):
            return (0, 1)
        if node.op == "dot" and self.axis is not None:  # rows of one side, columns of the other
            return (self.axis,)
        sums = node.op == "reduce" and node.attrs["fn"] == "sum" and self.axis is None
        return (0,) if sums or node.op in ("div", "neg", "cast", "broadcast", "expand") else ()

    def _beneath(self, node: Node) -> Factor | None:
        """The same in what an axis is put into; None where that is the factor's own."""
        at = node.attrs["axis"]
        if self.axis is None or at > self.axis:
            return self
        return None if at == self.axis else Factor(self.g, self.factor, self.axis - 1)

    def is_spread(self, node: Node) -> bool:
        """Whether a value is the factor, alike along all axes but its own."""
        if node is self.factor:
            return self.axis in (None, 0)
        if node.op in ("broadcast", "cast"):
            return (self.axis is None or len(node.args[0].shape) == len(node.shape)) and self.is_spread(
                node.args[0]
            )
        inner = self._beneath(node) if node.op == "expand" else None
        return inner is not None and inner.is_spread(node.args[0])

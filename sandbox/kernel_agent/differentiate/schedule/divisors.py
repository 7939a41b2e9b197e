"""A number that a whole block is divided by: its reciprocal is taken once and multiplied.

    d = (d_y - tl.sum(d_y * y, axis=0)) / total        inv_total = 1.0 / total, and * inv_total

For gradients, and for quotients of the forward that only gradients are multiplied with and nothing else is
made of: a comparison or a rounding of one has to see what the forward saw. A product with such a quotient
takes it whole:

    y = e / total; d = (...) / total * e               y = e * inv_total; d = (...) * y

Loops that carry adjoints from step to step, as those that run backwards, are done one by one, each in its
place: a number of a step is inverted in that step.
"""

from __future__ import annotations

from collections import Counter

from ..ir.graph import Graph
from ..ir.nodes import For, Node, nodes_in, operands, reachable, walk
from ..ir.rewriter import Rewriter
from ..reverse.sweep import Reverse


def invert(reverse: Reverse) -> None:
    """Multiply by reciprocals of numbers that were computed."""
    g = reverse.kernel.graph
    made: dict[Node, Node] = {}
    factors, uses = _factors(reverse)
    quotients = {node.args: node for node in factors if _divides(node) and not _carried(node.args[0])}

    def product(node: Node) -> Node | None:
        if node not in made:
            new = _whole(node) if node.op == "mul" else _inverted(node)
            if new is None:
                return None
            new.upstream, new.hint = node.upstream, node.hint
            made[node] = new
        return made[node]

    def _inverted(node: Node) -> Node | None:
        if not (node.upstream or node in factors) or not _divides(node) or _carried(node.args[0]):
            return None
        return _by_inverse(g, node, rewriter.node(node.args[0]))

    def _whole(node: Node) -> Node | None:
        for gradient, other in (node.args, node.args[::-1]):
            if not (gradient.op == "div" and gradient.upstream and uses[gradient] == 1):
                continue
            quotient = quotients.get((other, gradient.args[1]))
            whole = quotient is not None and _divides(gradient) and not _carried(gradient.args[0])
            if whole and quotient is not None and gradient.shape == quotient.shape:
                parts = rewriter.node(gradient.args[0]), rewriter.node(quotient)
                g.reverse, g.line = True, node.line
                with g.at(node.home):
                    return g.mul(*parts)
        return None

    rewriter = Rewriter(g, product)
    reverse.effects = rewriter.effects(reverse.effects)
    for loop in [e for e in walk(reverse.effects) if isinstance(e, For) and e.order == "reverse"]:
        _in_steps(g, loop)


def _in_steps(g: Graph, loop: For) -> None:
    """The same for the gradients of a loop's own steps."""

    def inverted(node: Node) -> Node | None:
        around = next((region for region in node.home.chain() if region.is_loop), None)
        if around is not loop.region or not (node.upstream and _divides(node)):
            return None
        return _by_inverse(g, node, rewriter.node(node.args[0]))

    rewriter = Rewriter(g, inverted)
    loop.effects = rewriter.effects(loop.effects)
    for carry in loop.carries:
        carry.next = None if carry.next is None else rewriter.node(carry.next)


def _by_inverse(g: Graph, node: Node, over: Node) -> Node:
    """A quotient as a product."""
    divisor = node.args[1]
    g.reverse, g.line = node.reverse, node.line
    with g.at(divisor.home):
        inverse = g.div(g.number(1), divisor)
    if divisor.hint and inverse.hint is None:
        inverse.hint = f"inv_{divisor.hint}"
    with g.at(node.home):
        new = g.mul(over, inverse)
    new.upstream, new.hint = node.upstream, node.hint
    return new


def _divides(node: Node) -> bool:
    """Whether a value is a block divided by a number that was computed."""
    if node.op != "div" or not (node.shape and node.is_float):
        return False
    over, divisor = node.args
    given = divisor.op in ("param", "const", "constexpr") or divisor.dtype != over.dtype
    return not (divisor.shape or given or over.shape != node.shape)


def _carried(node: Node) -> bool:
    """Whether a value hangs on what a loop around it has so far, of which a rewritten loop has its own."""
    inside = (n for n in nodes_in([node]) if n.op in ("phi", "loopout"))
    return any(region.is_loop for n in inside for region in n.home.chain())


def _factors(reverse: Reverse) -> tuple[set[Node], Counter[Node]]:
    """What gradients are multiplied with and nothing else is made of; how often each value is used."""
    uses: Counter[Node] = Counter()
    times: Counter[Node] = Counter()
    for item in reachable(reverse.effects):
        parts = [part for part in operands(item) if isinstance(part, Node)]
        uses.update(parts)
        if isinstance(item, Node) and item.op == "mul" and item.upstream:
            times.update(item.args)
    return {node for node, count in times.items() if count == uses[node] and not node.upstream}, uses

"""A number that a whole block is divided by: its reciprocal is taken once and multiplied.

    d = (d_y - tl.sum(d_y * y, axis=0)) / total        inv_total = 1.0 / total, and * inv_total

For gradients alone: what the forward computed is computed again as it was.
"""

from __future__ import annotations

from ..ir.nodes import Node, nodes_in
from ..ir.rewriter import Rewriter
from ..reverse.sweep import Reverse


def _carried(node: Node) -> bool:
    """Whether a value hangs on what a loop around it has so far, of which a rewritten loop has its own."""
    inside = (n for n in nodes_in([node]) if n.op in ("phi", "loopout"))
    return any(region.is_loop for n in inside for region in n.home.chain())


def invert(reverse: Reverse) -> None:
    """Multiply by reciprocals of numbers that were computed."""
    g = reverse.kernel.graph
    made: dict[Node, Node] = {}

    def product(node: Node) -> Node | None:
        if node.op != "div" or not (node.upstream and node.shape and node.is_float):
            return None
        if node not in made:
            over, divisor = node.args
            given = divisor.op in ("param", "const", "constexpr") or divisor.dtype != over.dtype
            if divisor.shape or given or over.shape != node.shape or _carried(over):
                return None
            g.reverse, g.line = True, node.line
            with g.at(divisor.home):
                inverse = g.div(g.number(1), divisor)
            if divisor.hint and inverse.hint is None:
                inverse.hint = f"inv_{divisor.hint}"
            with g.at(node.home):
                made[node] = g.mul(rewriter.node(over), inverse)
            made[node].upstream, made[node].hint = True, node.hint
        return made[node]

    rewriter = Rewriter(g, product)
    reverse.effects = rewriter.effects(reverse.effects)

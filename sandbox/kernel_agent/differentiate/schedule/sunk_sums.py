"""What a loop does with a product of each step in front of a sum, done once behind the loop.

    for m in range(...):                              for m in range(...):
        d = tl.dot(x, d_y)                                d_sum += tl.dot(x, d_y)
        d_scale += tl.sum(d * weight, axis=0)         d_scale = tl.sum(d_sum * weight, axis=0)

Where all that is done is linear in the product, and the same in each step, it may be done to the sum of the
products. Those add up where they are made, and nothing waits for one before the next; sums over lanes of each
one take longer than the products. The sum is one more tile that a program holds through the loop: of one
product alone, and where it holds no other.
"""

from __future__ import annotations

from ..ir.graph import Graph
from ..ir.nodes import Carry, For, Node, Region, nodes_in
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..ir.values import loop_out

_SAME = ("neg", "broadcast", "expand", "permute", "reshape")  # linear in all that they have


def sink(g: Graph, totals: list[Node]) -> list[Node]:
    """Sums of the steps of loops that are nobody else's, of the sums of products where they may be."""
    loops = {n.attrs["loop"]: None for n in nodes_in(totals) if n.op == "loopout"}
    behind: dict[Node, Node] = {}
    for loop in sorted(loops, key=lambda one: -one.region.depth):  # those inside first
        for carry in loop.carries:
            carry.next = carry.next and Rewriter(g, behind.get).node(carry.next)
        behind |= _behind(g, loop)
    return [Rewriter(g, behind.get).node(total) for total in totals]


def _behind(g: Graph, loop: For) -> dict[Node, Node]:
    """What the ends of a loop are, where it sums a product alone."""
    added = {at: _added(carry) for at, carry in enumerate(loop.carries)}
    known = {at: value for at, value in added.items() if value is not None}
    dots = {at: _product(value, loop.region) for at, value in known.items()}
    found = {at: dot for at, dot in dots.items() if dot is not None}
    others = [carry for at, carry in enumerate(loop.carries) if at not in found]
    if loop.effects or len({*found.values()}) != 1 or any(len(c.phi.shape) > 1 for c in others):
        return {}
    (dot,) = {*found.values()}
    if all(known[at] is dot for at in found):
        return {}
    with g.at(loop.outer):
        zeros = g.zeros(dot.shape, dot.dtype)
    phi = g.adjoint_carry(f"{dot.hint or 'd'}_sum", dot, loop.region)
    with g.at(loop.region):
        following = g.add(phi, dot)
    new = For(
        loop.region, loop.outer, [*others, Carry(phi, zeros, following)], order=loop.order, line=loop.line
    )
    ends = {id(carry): loop_out(g, new, at) for at, carry in enumerate(new.carries)}
    for end in ends.values():
        end.upstream = True
    total = ends[id(new.carries[-1])]
    behind: dict[Node, Node] = {}
    for at, carry in enumerate(loop.carries):
        old = loop_out(g, loop, at)
        if at not in found:
            behind[old] = ends[id(carry)]
            continue
        with g.at(loop.outer):
            value = _of(g, known[at], loop.region, {dot: total})
            joined = g.sub(carry.init, value) if carry.next.op == "sub" else g.add(carry.init, value)  # type: ignore[union-attr]
        joined.hint = joined.hint or old.hint
        behind[old] = joined
    return behind


def _added(carry: Carry) -> Node | None:
    """What each step adds to a carry, or takes away."""
    step = carry.next
    if step is None or step.op not in ("add", "sub"):
        return None
    one, other = step.args
    if one is carry.phi:
        return other
    return one if other is carry.phi and step.op == "add" else None


def _product(value: Node, region: Region) -> Node | None:
    """The product that a value is linear in, by what is the same in all steps of a loop."""
    if not value.home.inside(region):
        return None
    if value.op == "dot":
        plain = len(value.args) == 2 and value.dtype == "float32" and value.home is region
        return value if plain else None
    linear = value.op in _SAME or value.op == "reduce" and value.attrs["fn"] == "sum"
    args = list(value.args)
    if value.op == "mul":
        linear = sum(arg.home.inside(region) for arg in args) == 1
        args = [arg for arg in args if arg.home.inside(region)]
    elif value.op == "div":
        linear, args = not args[1].home.inside(region), args[:1]
    elif value.op == "where":
        linear = not args[0].home.inside(region)
        args = [arg for arg in args[1:] if not is_zero(arg)]
    elif value.op in ("add", "sub"):
        linear = True
    found = {_product(arg, region) for arg in args} if linear else {None}
    return found.pop() if len(found) == 1 else None


def _of(g: Graph, value: Node, region: Region, table: dict[Node, Node]) -> Node:
    """A value of other arguments, outside of the loop."""
    if value not in table:
        inside = value.home.inside(region)
        table[value] = g.again(value, [_of(g, arg, region, table) for arg in value.args]) if inside else value
        table[value].hint = table[value].hint or value.hint
    return table[value]

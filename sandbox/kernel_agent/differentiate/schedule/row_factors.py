"""A factor of rows in front of products of blocks, as that of a softmax is, behind them.

    d = (d_o * (1 / row_sum)[:, None]).to(half)        d_o as it was loaded
    tl.dot(d, v)                                       tl.dot(d_o, v) * factor[:, None]
    tl.dot(tl.trans(p.to(half)), d)                    tl.dot(tl.trans((p * factor[:, None]).to(half)), d_o)

The block that is loaded is then an operand itself: it goes to the tensor cores without passing registers, the
loads of the next one run ahead, and it is rounded once less. Numbers that an operand is multiplied with, on
either side of a mask, are multiplied first. It is done where the factor is one by a sum of
the p, none of which is negative: what is rounded to half is no greater than 1 then. Rows whose upstream is
all zero have no part in a gradient whatever their factor, which is 0 for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.nodes import Node, beneath, nodes_in, real
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_number, is_zero
from ..reverse.sweep import Reverse

EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True)
class Scaled:
    """An operand: `loaded` times a factor of each row, where it is not zero."""

    operand: Node
    loaded: Node
    is_zero: Node
    factor: Node
    total: Node  # what one is divided by in it


def move(reverse: Reverse) -> list[Node]:
    """Have the products of such operands done before the factor; the factors of those that are."""
    g, factors = reverse.kernel.graph, []
    dots = [n for n in nodes_in(reverse.effects) if n.op == "dot"]
    for scaled in _scaled(dots):
        users = [n for n in dots if scaled.operand in n.args]
        others = [n for n in nodes_in(reverse.effects) if scaled.operand in n.args and n.op != "dot"]
        after = [n for n in users if n.args[0] is scaled.operand and n.args[1] is not scaled.operand]
        before = {n: p for n in users if (p := _weights(reverse, n, scaled)) is not None}
        if others or not before or len(after) + len(before) < len(users):
            continue
        factor = _factor(reverse, scaled)
        operand = _as(reverse, scaled.loaded, scaled.operand.dtype)
        moved: dict[Node, Node] = {}
        for dot in users:
            g.reverse, g.line = True, dot.line
            with g.at(dot.home):
                if dot in before:
                    weight = g.mul(before[dot], g.expand(factor, 1))
                    new = g.again(dot, [_wrapped(reverse, dot.args[0], before[dot], weight), operand])
                else:
                    product = g.again(dot, [operand, *dot.args[1:]])
                    new = g.mul(product, g.expand(factor, 1))
            new.upstream, new.hint = True, dot.hint
            moved[dot] = new
        if any(n in moved and n is not new for new in moved.values() for n in nodes_in([new])):
            continue  # one is a part of another
        reverse.effects = Rewriter(g, moved.get).effects(reverse.effects)
        reason = "the factor of a row is multiplied in behind products"
        reverse.say(scaled.factor.line, "factor", "none", reason)
        _join_numbers(reverse)
        factors.append(factor)
    return factors


def _join_numbers(reverse: Reverse) -> None:
    """where(mask, x * a, 0) * b as where(mask, x * (a * b), 0), for operands of products."""
    g, joined = reverse.kernel.graph, {}
    dots = [n for n in nodes_in(reverse.effects) if n.op == "dot"]
    for value in {beneath(arg, "permute", "cast") for dot in dots for arg in dot.args[:2]}:
        if value.op != "mul" or value.args[0].op != "where" or not one_number(value.args[1]):
            continue
        (mask, product, zero), number = value.args[0].args, value.args[1]
        if product.op != "mul" or product.args[1].op != "const" or not is_zero(zero):
            continue
        g.reverse, g.line = True, value.line
        with g.at(number.home):
            both = g.mul(product.args[1], number)
        with g.at(value.home):
            joined[value] = g.where(mask, g.mul(product.args[0], both), zero)
            joined[value].upstream = True
    reverse.effects = Rewriter(g, joined.get).effects(reverse.effects)


def one_number(node: Node) -> bool:
    """Whether a value is a number that all programs have."""
    parts = list(nodes_in([node]))
    return not node.shape and node.is_float and all(n.op in ("param", "const", "mul", "cast") for n in parts)


def _scaled(dots: list[Node]) -> list[Scaled]:
    """The operands of products that have the form of one."""
    found: dict[Node, Scaled] = {}
    for operand in (arg for dot in dots for arg in dot.args[:2]):
        value = beneath(operand, "cast")
        if value.op != "where" or len(value.shape) != 2 or not is_zero(value.args[1]):
            continue
        zero, _, product = value.args
        if (
            zero.op != "compare"
            or zero.attrs["cmp"] != "=="
            or not is_zero(zero.args[1])
            or product.op != "mul"
        ):
            continue
        loaded, row = product.args if zero.args[0] is product.args[0] else product.args[::-1]
        if zero.args[0] is not loaded or row.op != "expand" or row.attrs["axis"] != 1:
            continue
        memory, factor = beneath(loaded, "cast"), row.args[0]
        half = memory.op == "load" and real(memory.dtype) == real(operand.dtype)
        one = factor.op == "div" and is_number(factor.args[0], 1)
        top = factor.home.parent is None and memory.home.parent is None
        if half and one and top:
            found[operand] = Scaled(operand, memory, zero, factor, factor.args[1])
    return list(found.values())


def _weights(reverse: Reverse, dot: Node, scaled: Scaled) -> Node | None:
    """The p of a product of their transpose and the operand, where the factor is one by their sum."""
    if len(dot.args) != 2 or dot.args[1] is not scaled.operand or dot.args[0].op != "permute":
        return None
    weights = beneath(dot.args[0], "permute", "cast")
    if weights.op != "call" or weights.attrs["fn"] not in EXPONENTIALS or weights.dtype != "float32":
        return None
    ends = [scaled.total, *(new for new, old in reverse.kernel.equal.items() if old is scaled.total)]
    for end in (n for n in ends if n.op == "loopout"):
        carry = end.attrs["loop"].carries[end.attrs["index"]]
        following = carry.next
        if following is None or following.op != "add" or carry.phi not in following.args:
            continue
        (added,) = [a for a in following.args if a is not carry.phi] or [carry.phi]
        summed = added.op == "reduce" and added.attrs["fn"] == "sum" and added.attrs["axis"] == 1
        if summed and added.args[0] is weights and is_zero(carry.init):
            return weights
    return None


def _factor(reverse: Reverse, scaled: Scaled) -> Node:
    """The factor of each row; 0 where nothing comes from upstream."""
    g = reverse.kernel.graph
    g.reverse, g.line = True, scaled.factor.line
    with g.at(g.top):
        some = g.reduce("max", g.where(scaled.is_zero, g.number(0), g.number(1)), 1)
        cond = g.compare(">", some, g.number(0))
        factor = g.make("where", (cond, scaled.factor, g.number(0)), {"kept": True}, "float32", cond.shape)
    factor.hint, factor.upstream = "factor", True
    return factor


def _as(reverse: Reverse, loaded: Node, dtype: str) -> Node:
    g = reverse.kernel.graph
    with g.at(loaded.home):
        return loaded if loaded.dtype == dtype else g.cast(loaded, dtype)


def _wrapped(reverse: Reverse, operand: Node, old: Node, new: Node) -> Node:
    """An operand with another value inside of its transposition and cast."""
    if operand is old:
        return new
    g = reverse.kernel.graph
    return g.again(operand, [_wrapped(reverse, operand.args[0], old, new)])

"""The factor of a row, as that of a softmax is, in the exponents of its weights.

    p = tl.exp2(s - row_max[:, None])                        p = tl.exp2(s - log_sum[:, None])
    tl.dot(tl.trans((p * factor[:, None]).to(half)), d)      tl.dot(tl.trans(p.to(half)), d)
    d_p = tl.dot(d, v) * factor[:, None] + d_row_sum[:, None]
    d_p * p * scale                                          (tl.dot(d, v) * scale + d_row_sum[:, None]) * p

with log_sum = row_max + log2(row_sum), which is the logarithm of the sum of exponentials. Of what is done for
each score, two multiplications go and one joins an addition. The factor is the one of `row_factors`: one by a
sum of the weights p, and 0 for rows whose upstream is all zero; log_sum is infinite for those, and their p
are 0. Not so where the row itself has something from upstream, as the second output of an attention may be
its log_sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from ..ir.graph import Graph
from ..ir.nodes import Node, nodes_in
from ..ir.rewriter import Rewriter
from ..ir.simplify import is_zero
from ..reverse.sweep import Reverse
from .row_factors import one_number

LOGARITHMS = {"exp": "log", "exp2": "log2"}


def use(reverse: Reverse, factors: list[Node], asked: bool) -> bool:
    """Move the factors if that is asked; else whether it would change anything."""
    if asked:
        move(reverse, factors)
    return not asked and applies(reverse, factors)


def applies(reverse: Reverse, factors: list[Node]) -> bool:
    """Whether some of the factors that row_factors.move() left may be in an exponent."""
    return any(_Fold(reverse.kernel.graph, factor).find(reverse) is not None for factor in factors)


def move(reverse: Reverse, factors: list[Node]) -> None:
    """Have the exponents of rows hold their factors."""
    for factor in factors:
        fold = _Fold(reverse.kernel.graph, factor)
        found = fold.find(reverse)
        if found is not None:
            reverse.effects = Rewriter(fold.g, fold.table(found).get).effects(reverse.effects)
            reason = "the factor of a row is in the exponents: `log_sum` is that of all that were summed"
            reverse.say(factor.args[1].line, "exponent", "none", reason)


@dataclass(frozen=True)
class _Adjoint:
    """(dot * factor + rest / total) * weight, and a number that all its users multiply it with."""

    sum: Node  # dot * factor + rest / total
    dot: Node
    rest: Node  # of a row, over the total
    number: Node | None
    users: list[Node]  # that multiply, or itself


@dataclass(frozen=True)
class _Found:
    """What has one factor: products of the weight, and adjoints of it."""

    weight: Node  # an exponential of score - least[:, None]
    least: Node
    factored: list[Node]
    adjoints: list[_Adjoint]


class _Fold:
    """One factor: where(some, 1 / total, 0)."""

    def __init__(self, g: Graph, factor: Node) -> None:
        self.g = g
        self.factor = factor
        self.some, self.inverse, _ = factor.args
        self.total = self.inverse.args[1]

    def find(self, reverse: Reverse) -> _Found | None:
        """What has the factor; None where not all of it is of the form above."""
        users: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes_in(reverse.effects):
            for arg in dict.fromkeys(node.args):
                users[arg].append(node)
        rows = [n for n in users[self.factor] if _is_row(n)]
        if len(rows) != 1 or len(rows) < len(users[self.factor]):
            return None
        (row,) = rows
        others = {n: _other(n, row) for n in users[row] if n.op == "mul"}
        weights = {other for other in others.values() if other.op == "call"}
        if len(weights) != 1 or len(others) < len(users[row]):
            return None
        (weight,) = weights
        exponent = weight.args[0]
        if weight.attrs["fn"] not in LOGARITHMS or exponent.op != "sub" or not _is_row(exponent.args[1]):
            return None
        least = exponent.args[1].args[0]
        adjoints = [self.adjoint(n, weight, users) for n, other in others.items() if other is not weight]
        known = [one for one in adjoints if one is not None]
        if least.home.parent is not None or len(known) < len(adjoints):
            return None
        return _Found(weight, least, [n for n, other in others.items() if other is weight], known)

    def table(self, found: _Found) -> dict[Node, Node]:
        """What stands for what has the factor."""
        rests = [self.without(one.rest) for one in found.adjoints]
        some = self.some_of(rests)
        new = self.weight(found, some)
        table = dict.fromkeys(found.factored, new)
        for one, rest in zip(found.adjoints, rests, strict=True):
            table |= dict.fromkeys(one.users, self.made(one, rest, new, some))
        return table

    def adjoint(self, product: Node, weight: Node, users: dict[Node, list[Node]]) -> _Adjoint | None:
        total = _only(users[product])
        weighted = None if total is None or total.op != "add" else _only(users[total])
        if total is None or weighted is None:
            return None
        row = _other(total, product)
        if weighted.op != "mul" or _other(weighted, total) is not weight:
            return None
        if not _is_row(row) or row.home.parent is not None or not self.is_over(row.args[0]):
            return None
        numbers = {_other(n, weighted) for n in users[weighted] if n.op == "mul"}
        alike = len(numbers) == 1 and all(n.op == "mul" for n in users[weighted])
        number = numbers.pop() if alike else None
        number = number if number is not None and one_number(number) else None
        factored = users[weighted] if number is not None else [weighted]
        dot = product.args[0] if _is_row(product.args[1]) else product.args[1]
        return _Adjoint(total, dot, row.args[0], number, factored)

    def is_over(self, rest: Node) -> bool:
        """Whether a number of rows is a sum of parts that are all divided by the total."""
        if rest.op in ("div", "mul"):
            return self.divided(rest) is not None
        return self.is_sum(rest) and all(map(self.is_over, _parts(rest)))

    def divided(self, value: Node) -> Node | None:
        """What is divided by the total, or multiplied with one by it."""
        if value.op == "div":
            return value.args[0] if value.args[1] is self.total else None
        row = next((arg for arg in value.args if _is_row(arg) and arg.args[0] is self.inverse), None)
        return None if row is None else _other(value, row)

    def is_sum(self, value: Node) -> bool:
        if value.op == "reduce":
            return value.attrs["fn"] == "sum" and value.attrs["axis"] == 1
        return value.op in ("add", "neg") or (value.op == "where" and is_zero(value.args[1]))

    def without(self, rest: Node) -> Node:
        """What is_over() is true of, times the total."""
        if rest.op in ("div", "mul"):
            found = self.divided(rest)
            assert found is not None
            return found
        parts, before = _parts(rest), self.g.count
        with self.g.at(rest.home):
            new = self.g.again(rest, [*rest.args[: -len(parts)], *map(self.without, parts)])
        if new.id > before:
            new.hint, new.line, new.upstream = rest.hint, rest.line, rest.upstream
        return new

    def some_of(self, rests: list[Node]) -> Node:
        """Whether anything comes from upstream: to the products, or to the rows themselves."""
        g, some = self.g, self.some
        is_zero = some.args[0].args[0].args[0]
        for rest in rests:
            of_products = (
                rest.op == "reduce" and rest.args[0].op == "where" and rest.args[0].args[0] is is_zero
            )
            if not of_products:
                with g.at(g.top):
                    some = g.make("or", (some, g.compare("!=", rest, g.number(0))), {}, "int1")
        return some

    def weight(self, found: _Found, some: Node) -> Node:
        """The weights times the factor: exponentials of what is less than before by a logarithm."""
        g, old = self.g, found.weight
        g.reverse, g.line = True, self.inverse.line
        with g.at(g.top):
            log_sum = g.add(found.least, g.call(LOGARITHMS[old.attrs["fn"]], self.total))
            args = (some, log_sum, g.number(math.inf))
            log_sum = g.make("where", args, {"kept": True}, "float32", log_sum.shape)
        log_sum.hint, log_sum.upstream = "log_sum", True
        g.line = old.line
        with g.at(old.home):
            new = g.call(old.attrs["fn"], g.sub(old.args[0].args[0], g.expand(log_sum, 1)))
        new.hint, new.upstream = old.hint, True
        return new

    def made(self, one: _Adjoint, rest: Node, weight: Node, some: Node) -> Node:
        """The adjoint of weights that have the factor."""
        g, number = self.g, one.number
        g.reverse, g.line = True, one.sum.line
        with g.at(g.top):
            op, args = ("where", (some, rest, g.number(0))) if number is None else ("mul", (rest, number))
            by_row = g.make(op, args, {"kept": True}, "float32", rest.shape)
        by_row.hint, by_row.upstream = one.rest.hint, True
        with g.at(one.sum.home):
            summed = g.add(one.dot if number is None else g.mul(one.dot, number), g.expand(by_row, 1))
            summed.hint = one.sum.hint
            both = g.mul(summed, weight)
        both.upstream = True
        return both


def _only(nodes: list[Node]) -> Node | None:
    return nodes[0] if len(nodes) == 1 else None


def _parts(total: Node) -> tuple[Node, ...]:
    """What a sum of any kind is over."""
    return total.args[2:] if total.op == "where" else total.args


def _is_row(value: Node) -> bool:
    """Whether a tile has one number in each row."""
    return value.op == "expand" and value.attrs["axis"] == 1


def _other(node: Node, arg: Node) -> Node:
    """The argument of two that is not this one."""
    return node.args[1] if node.args[0] is arg else node.args[0]

"""What a step of a loop does to what the loop carries: c' = f c + g, or a sum, c' = c + g."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.graph import Graph
from ..ir.nodes import For, If, Node, operands, reachable
from ..ir.ranges import at_most_one
from ..ir.simplify import is_zero


class Stays(Exception):
    """The loop has something that is not known to be the same for several steps at once."""


@dataclass(frozen=True)
class Linear:
    """A carry c of which a step makes f s + g, where s = c + u is all that takes it; None is zero."""

    taken: Node  # s
    added: list[Node]  # that make up u
    factor: Node | None  # f
    rest: Node | None  # g


class Body:
    """What one step of a loop computes, and which of it hangs on which of the loop's carries."""

    def __init__(self, g: Graph, loop: For) -> None:
        self.g, self.loop, self.region = g, loop, loop.region
        self.phis = {carry.phi: k for k, carry in enumerate(loop.carries)}
        self.nexts = [carry.next for carry in loop.carries if carry.next is not None]
        self.hanging: dict[Node, frozenset[int]] = {}
        self.items = list(reachable([*loop.effects, *filter(self.is_inside, self.nexts)], self.parts))
        self.users: dict[Node, list[Any]] = {}
        for item in self.items:
            for part in self.parts(item):
                self.users.setdefault(part, []).append(item)
        for k, node in enumerate(self.nexts):
            self.users.setdefault(node, []).append(k)

    def is_inside(self, item: object) -> bool:
        return not isinstance(item, Node) or item.home.inside(self.region)

    def parts(self, item: Any) -> list:
        """What an item consists of, as far as a step computes it."""
        if isinstance(item, Node) and item in self.loop.provides:
            return [part for part in [self.loop.provides[item]] if self.is_inside(part)]
        return [part for part in operands(item) if self.is_inside(part)]

    def hangs(self, node: Node) -> frozenset[int]:
        """The carries that a value hangs on, by their numbers."""
        if node not in self.hanging:
            found: frozenset[int] = frozenset()
            if node in self.phis:
                found = frozenset([self.phis[node]])
            elif node.home.inside(self.region):
                for part in self.parts(node):
                    found |= self.hangs(part) if isinstance(part, Node) else self._effects_hang(part)
            self.hanging[node] = found
        return self.hanging[node]

    def _effects_hang(self, item: object) -> frozenset[int]:
        """The same for a branch that a value is chosen by: its effects are no part of the value."""
        if not isinstance(item, If):
            raise Stays
        return self.hangs(item.cond)

    def only_summed(self, k: int) -> bool:
        """Whether nothing but its own next value hangs on a carry."""
        written = [item for item in self.items if not isinstance(item, Node)]
        read = (part for item in written for part in self.parts(item) if isinstance(part, Node))
        others = [node for at, node in enumerate(self.nexts) if at != k]
        return not any(k in self.hangs(node) for node in (*read, *others))

    def linear(self, k: int) -> Linear:
        """How a step takes a carry and makes the next."""
        taken, added = self.loop.carries[k].phi, []
        while (more := self._added_to(taken)) is not None:
            taken, term = more
            added.append(term)
        return Linear(taken, added, *self.form(k, taken))

    def _added_to(self, node: Node) -> tuple[Node, Node] | None:
        """The sum that is the only use of a value, and what is added there."""
        users = self.users.get(node, [])
        user = users[0] if len(users) == 1 else None
        if not isinstance(user, Node) or user.op != "add" or user.home is not self.region:
            return None
        one, other = user.args
        alike = user.shape == node.shape and user.dtype == node.dtype
        return (user, other if one is node else one) if alike else None

    def form(self, k: int, taken: Node) -> tuple[Node | None, Node | None]:
        """f and g of the next value of a carry, f s + g of a value s that takes it."""
        after = self.loop.carries[k].next
        assert after is not None
        return _Form(self, k, taken).of(after)


class _Form:
    """Values as f s + g; all that hangs on the carry does so through s."""

    def __init__(self, body: Body, k: int, taken: Node) -> None:
        self.body, self.g, self.k, self.taken = body, body.g, k, taken
        self.known: dict[Node, tuple[Node | None, Node | None]] = {}

    def of(self, node: Node) -> tuple[Node | None, Node | None]:
        if node is self.taken:
            return self.g.number(1), None
        if self.k not in self.body.hangs(node):
            return None, None if is_zero(node) else node
        if node not in self.known:
            if node.shape != self.taken.shape or node.dtype != self.taken.dtype:
                raise Stays
            with self.g.at(node.home):
                self.known[node] = self._of(node)
        return self.known[node]

    def _of(self, node: Node) -> tuple[Node | None, Node | None]:
        g = self.g
        if node.op in ("add", "sub"):
            sign = 1 if node.op == "add" else -1
            (f, one), (e, other) = map(self.of, node.args)
            return self._sum(f, e, sign), self._sum(one, other, sign)
        if node.op == "neg":
            f, one = self.of(node.args[0])
            return f and g.neg(f), one and g.neg(one)
        if node.op in ("mul", "div"):
            hanging = [self.k in self.body.hangs(arg) for arg in node.args]
            if hanging == [True, True] or node.op == "div" and hanging[1]:
                raise Stays
            by = node.args[hanging.index(False)]
            f, one = self.of(node.args[hanging.index(True)])
            return self._times(node.op, f, by), self._times(node.op, one, by)
        if node.op == "where" and self._asks_for_zero(node):
            return self.of(node.args[2])
        if node.op == "where" and self.k not in self.body.hangs(node.args[0]):
            (f, one), (e, other) = map(self.of, node.args[1:])
            return self._where(node.args[0], f, e), self._where(node.args[0], one, other)
        if node.op == "ifout":
            return self._chosen(node)
        raise Stays

    def _asks_for_zero(self, node: Node) -> bool:
        """where(s == 0, 0, f s), which is f s where f is finite."""
        cond, zero, product = node.args
        asked = cond.op == "compare" and cond.attrs["cmp"] == "==" and cond.args[0] is self.taken
        if not asked or not is_zero(cond.args[1]) or not is_zero(zero):
            return False
        f, one = self.of(product)
        return f is not None and one is None and at_most_one(f)

    def _sum(self, a: Node | None, b: Node | None, sign: int) -> Node | None:
        return a if b is None else self.g.signed(a, b, sign)

    def _times(self, op: str, a: Node | None, by: Node) -> Node | None:
        return None if a is None else self.g.make(op, (a, by))

    def _where(self, cond: Node, a: Node | None, b: Node | None) -> Node | None:
        zero = self.g.number(0)
        return None if a is None and b is None else self.g.where(cond, a or zero, b or zero)

    def _chosen(self, node: Node) -> tuple[Node | None, Node | None]:
        """The same of a value that a branch chooses, whose effects are left where they are."""
        old, then, other = node.attrs["if"], node.attrs["then"], node.attrs["other"]
        if then is None or other is None or self.k in self.body.hangs(old.cond):
            raise Stays
        pairs = list(zip(self.of(then), self.of(other), strict=True))
        new = If(old.cond, old.then, old.other, [], [], old.outer, old.static, old.line)
        made: list[Node | None] = []
        for a, b in pairs:
            if a is b:
                made.append(a)
                continue
            one, two = self._whole(a, node, old.then), self._whole(b, node, old.other)
            made.append(self.g.merged(new, one, two, node, node.home))
        return made[0], made[1]

    def _whole(self, value: Node | None, like: Node, region: Any) -> Node:
        with self.g.at(region):
            if value is None:
                return self.g.zeros(like.shape, like.dtype)
            if not value.shape and value.op == "const":
                return self.g.const(value.value, like.dtype, like.shape) if like.shape else value
            if value.dtype != like.dtype:
                value = self.g.cast(value, like.dtype)
            return value if value.shape == like.shape else self.g.broadcast(value, like.shape)

"""Bounds of what is computed, whatever is loaded: by the operations alone, up to their rounding."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.nodes import Node, sides

_SAME = ("cast", "expand", "broadcast", "full", "permute")  # elements as they are
_WITHIN = ("sigmoid", "tanh", "sin", "cos", "erf")  # of magnitude 1 at most
_POSITIVE = ("exp", "exp2", "sqrt", "abs", "rsqrt")


def at_most_one(node: Node) -> bool:
    """Whether the magnitude of every element is 1 at most."""
    return _Bounds().is_small(node)


class _Bounds:
    """What is known of values; each question about one is answered once."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, Node], bool] = {}

    def _asked(self, what: str, node: Node, answer: Callable[[Node], bool]) -> bool:
        key = (what, node)
        if key not in self.known:
            same = node.op in _SAME and (node.is_float or what != "small")
            ask = getattr(self, f"is_{what}")
            if same:
                self.known[key] = ask(node.args[0])
            elif node.op in ("where", "ifout"):
                self.known[key] = all(map(ask, _choices(node))) or answer(node)
            else:
                self.known[key] = answer(node)
        return self.known[key]

    def is_small(self, node: Node) -> bool:
        """Within -1 and 1."""

        def answer(node: Node) -> bool:
            if node.op in ("mul", "neg"):
                return all(map(self.is_small, node.args))
            within = node.op == "call" and node.attrs["fn"] in _WITHIN
            return within or _is_number(node, lambda value: abs(value) <= 1) or self.is_share(node)

        return self._asked("small", node, answer)

    def is_share(self, node: Node) -> bool:
        """Within 0 and 1."""

        def answer(node: Node) -> bool:
            if node.op == "mul":
                return all(map(self.is_share, node.args))
            if node.op == "sub":
                whole, part = node.args
                return _is_number(whole, lambda value: value == 1) and self.is_share(part)
            if node.op == "call" and node.attrs["fn"] in ("exp", "exp2"):
                return self.is_negative(node.args[0])
            sigmoid = node.op == "call" and node.attrs["fn"] == "sigmoid"
            return sigmoid or _is_number(node, lambda value: 0 <= value <= 1)

        return self._asked("share", node, answer)

    def is_positive(self, node: Node) -> bool:
        """0 at least."""

        def answer(node: Node) -> bool:
            if node.op in ("add", "div"):
                return all(map(self.is_positive, node.args))
            if node.op == "neg":
                return self.is_negative(node.args[0])
            if node.op == "mul":
                return all(map(self.is_positive, node.args)) or all(map(self.is_negative, node.args))
            if node.op == "maximum":
                return any(map(self.is_positive, node.args))
            if node.op == "where":  # x > 20, x, ...: a softplus
                cond, a, b = node.args
                above = cond.op == "compare" and cond.attrs["cmp"] in (">", ">=") and cond.args[0] is a
                return above and self.is_positive(cond.args[1]) and self.is_positive(b)
            if node.op == "call" and node.attrs["fn"] in ("log", "log1p"):
                more = self.is_above_one if node.attrs["fn"] == "log" else self.is_positive
                return more(node.args[0])
            called = node.op == "call" and node.attrs["fn"] in _POSITIVE
            return called or _is_number(node, lambda value: value >= 0) or self.is_share(node)

        return self._asked("positive", node, answer)

    def is_negative(self, node: Node) -> bool:
        """0 at most."""

        def answer(node: Node) -> bool:
            if node.op == "add":
                return all(map(self.is_negative, node.args))
            if node.op == "neg":
                return self.is_positive(node.args[0])
            if node.op in ("sub", "div"):
                return self.is_negative(node.args[0]) and self.is_positive(node.args[1])
            if node.op == "mul":
                pairs = (node.args, node.args[::-1])
                return any(self.is_negative(a) and self.is_positive(b) for a, b in pairs)
            if node.op == "minimum":
                return any(map(self.is_negative, node.args))
            log = node.op == "call" and node.attrs["fn"] == "log" and self.is_share(node.args[0])
            return log or _is_number(node, lambda value: value <= 0)

        return self._asked("negative", node, answer)

    def is_above_one(self, node: Node) -> bool:
        """1 at least."""

        def answer(node: Node) -> bool:
            if node.op == "add":
                pairs = (node.args, node.args[::-1])
                return any(self.is_above_one(a) and self.is_positive(b) for a, b in pairs)
            if node.op == "maximum":
                return any(map(self.is_above_one, node.args))
            return _is_number(node, lambda value: value >= 1)

        return self._asked("above_one", node, answer)


def _choices(node: Node) -> list[Node]:
    """What a value is one of."""
    return list(node.args[1:]) if node.op == "where" else sides(node)


def _is_number(node: Node, holds: Callable[[float], bool]) -> bool:
    return node.op == "const" and type(node.value) in (int, float) and holds(node.value)

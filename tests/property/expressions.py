"""Random expressions of kernels: what a `Scope` has names for, combined by operations of Triton.

Every value in a program has one of the block shapes of its skeleton: "" (a scalar), "M", "N", "MN" and what a
transposition or a dot makes of them ("NM", "MM", "NN"). An expression is drawn for a wanted shape, so that it
always type-checks; ranges are kept such that logarithms, roots and quotients stay away from their poles.
Nothing stays away from kinks: the verdict knows how far rounding moves a gradient, and judges accordingly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

UNARY = [
    "tl.sin({})", "tl.cos({})", "tl.exp(-tl.abs({}))", "tl.exp2(tl.sin({}))", "tl.log(tl.abs({}) + 1.2)", "tl.log2({0} * {0} + 1.1)",
    "tl.sqrt({0} * {0} + 0.7)", "tl.rsqrt({0} * {0} + 0.7)", "tl.erf({})", "tl.sigmoid({})", "tl.abs({})", "libdevice.tanh({})",
    "libdevice.expm1(tl.sin({}))", "libdevice.log1p(tl.abs({}))", "libdevice.atan({})", "-{}", "tl.floor({}) * 0.5", "({} * 0.7)",
    "tl.maximum({}, 0.0)", "tl.clamp({}, -0.6, 0.8)", "tl.minimum({}, 1.0)", "libdevice.asin(tl.sin({}) * 0.8)", "tl.exp(tl.sin({}))",
    "libdevice.pow(tl.abs({}) + 0.6, 1.7)", "(1.0 / (tl.abs({}) + 1.3))", "({} / 3)", "(2 * {} + 1)", "({}).to(tl.int32).to(tl.float32) * 0.3",
]  # fmt: skip
BINARY = [
    "({} + {})", "({} - {})", "({} * {})", "({} * {})", "({} / (1.5 + tl.abs({})))", "tl.maximum({}, {})", "tl.minimum({}, {})",
    "tl.where({0} > {1}, {0} * 0.5, {1})", "libdevice.pow(tl.abs({}) + 0.7, tl.sin({}))", "tl.fma({}, {}, 0.5)", "twist({}, {})",
]  # fmt: skip
# Skeleton: the block shapes it has.
SHAPES = {"tiles": ["", "M", "N", "MN"], "rows": ["", "N"], "flat": ["", "N"]}


@dataclass
class Scope:
    """The lines of one block, and the values that can be named there."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # name -> shape
    depth: int = 1

    def add(self, text: str) -> None:
        self.lines += ["    " * self.depth + line for line in text.splitlines()]

    def inner(self) -> Scope:
        return Scope(names=dict(self.names), depth=self.depth + 1)


class Expressions:
    """What is drawn for one program, and its expressions."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.pick = random.Random(seed)
        self.features: dict[str, None] = {}
        self.count = 0
        self.loops = 0
        self.skeleton = self.pick.choices(["tiles", "rows", "flat"], [5, 3, 2])[0]
        self.shapes = SHAPES[self.skeleton]
        self.half = self.pick.random() < 0.12
        self.persistent = self.skeleton != "flat" and self.pick.random() < 0.12
        self.strided = self.pick.random() < 0.25
        self.whole = self.pick.random() < 0.4  # one program holds a whole row
        self.divisor = False  # whether what is divided by is loaded
        self.inplace = ""  # whether the result is written over `x`, and how that is passed
        self.iteration = ""  # the variable of the loop that is being written

    def note(self, feature: str) -> None:
        self.features[feature] = None

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def chance(self, share: float) -> bool:
        return self.pick.random() < share

    # ---- expressions

    def leaf(self, scope: Scope, shape: str) -> str:
        names = [n for n, s in scope.names.items() if s == shape]
        if not names or self.chance(0.08):
            made = self.made(scope, shape)
            if made:
                return made
        return self.pick.choice(names) if names else "0.5"

    def made(self, scope: Scope, shape: str) -> str:
        """A block of a shape for which there may be no name yet."""
        turned = {"NM": "MN", "MN": ""}.get(shape, "")
        if shape == "NM":
            return f"tl.trans({self.leaf(scope, turned)})"
        if shape == "MM":
            self.note("dot")
            return (
                f"(tl.dot({self.leaf(scope, 'MN')}, {self.leaf(scope, 'NM')}, input_precision='ieee') * 0.2)"
            )
        if shape == "NN":
            self.note("dot")
            return (
                f"(tl.dot({self.leaf(scope, 'NM')}, {self.leaf(scope, 'MN')}, input_precision='ieee') * 0.2)"
            )
        return ""

    def operand(self, scope: Scope, shape: str, depth: int) -> str:
        """An expression that broadcasts to a shape."""
        choices: list[Callable[[], str]] = [lambda: self.expression(scope, shape, depth)]
        if len(shape) == 2 and shape[1] in self.shapes:
            choices.append(lambda: f"({self.expression(scope, shape[1], depth)})[None, :]")
        if len(shape) == 2 and shape[0] in self.shapes:
            choices.append(lambda: f"({self.expression(scope, shape[0], depth)})[:, None]")
        if shape:
            choices.append(lambda: self.expression(scope, "", max(depth - 1, 0)))
        choices.append(lambda: self.pick.choice(["0.5", "-0.3", "1.25", "2.0"]))
        if self.iteration:
            choices.append(lambda: f"(0.3 * {self.iteration})")
        weights = [4, *[2] * (len(choices) - 1)]
        return self.pick.choices(choices, weights)[0]()

    def expression(self, scope: Scope, shape: str, depth: int) -> str:
        """A random expression of exactly this shape."""
        if depth <= 0:
            return self.leaf(scope, shape)
        kind = self.pick.random()
        if kind < 0.3:
            return self.pick.choice(UNARY).format(self.expression(scope, shape, depth - 1))
        if kind < 0.72:
            first, second = self.expression(scope, shape, depth - 1), self.operand(scope, shape, depth - 1)
            template = self.pick.choice(BINARY)
            if template == "({} + {})" and self.chance(0.5):
                first, second = second, first
            return template.format(first, second)
        if kind < 0.8:
            return self.where(scope, shape, depth)
        if kind < 0.93:
            return self.reduced(scope, shape, depth)
        return self.reshaped(scope, shape, depth)

    def where(self, scope: Scope, shape: str, depth: int) -> str:
        self.note("where")
        return (
            f"tl.where({self.condition(scope, shape)}, {self.expression(scope, shape, depth - 1)}, "
            f"{self.operand(scope, shape, depth - 1)})"
        )

    def condition(self, scope: Scope, shape: str) -> str:
        if shape == "MN" and self.chance(0.3):
            return self.pick.choice(
                ["rows[:, None] >= cols[None, :]", "(cols[None, :] + rows[:, None]) % 3 == 1", "mask"]
            )
        if shape == "N" and self.chance(0.3):
            return self.pick.choice(["cols % 2 == 0", "cols < n - 2", "cols + 1 < n"])
        sign = self.pick.choice([">", "<", ">=", "<="])
        return (
            f"{self.leaf(scope, shape)} {sign} {self.pick.choice(['0.1', '-0.4', self.leaf(scope, shape)])}"
        )

    def reduced(self, scope: Scope, shape: str, depth: int) -> str:
        """A sum, maximum or minimum over an axis, or a scan."""
        options = []
        if shape == "" and "N" in self.shapes:
            options += [("N", "axis=0"), ("MN", "")]
        if shape == "M":
            options.append(("MN", "axis=1"))
        if shape == "N":
            options.append(("MN", "axis=0"))
        options = [o for o in options if o[0] in self.shapes]
        if options and self.chance(0.8):
            of, axis = self.pick.choice(options)
            inner = self.expression(scope, of, depth - 1)
            function = self.pick.choice(["sum", "sum", "max", "min"])
            if axis == "":
                self.note("reduce all")
                return f"(tl.sum({inner}) * 0.05)"
            self.note(f"reduce {function}")
            return f"(tl.{function}({inner}, {axis}) * 0.3)"
        if shape in ("MN", "N") and self.chance(0.7):
            axis = len(shape) - 1 if self.chance(0.7) else 0
            inner = self.expression(scope, shape, depth - 1)
            kind = self.pick.random()
            if kind < 0.5:
                self.note("cumsum")
                return f"(tl.cumsum({inner}, axis={axis}{self.pick.choice(['', ', reverse=True'])}) * 0.2)"
            if kind < 0.7:
                self.note("softmax")
                return f"tl.softmax({inner}, dim={axis}, keep_dims=True)"
            if shape == "MN":
                self.note("keep_dims")
                function = self.pick.choice(["sum", "max", "min"])
                return (
                    f"({self.expression(scope, shape, depth - 1)} - tl.{function}({inner}, axis={axis}, "
                    "keep_dims=True) * 0.2)"
                )
        return self.expression(scope, shape, depth - 1)

    def reshaped(self, scope: Scope, shape: str, depth: int) -> str:
        inner = self.expression(scope, shape, depth - 1)
        if shape == "MN":
            other = self.expression(scope, shape, depth - 1)
            self.note("shape")
            options = [
                f"tl.trans(tl.trans({inner}) * {self.operand(scope, 'NM', 0)})",
                f"tl.reshape(tl.reshape({inner}, [M * N]) * 0.9, [M, N])",
                f"tl.flip({inner}, 1)",
                f"tl.broadcast_to(({self.expression(scope, 'N', depth - 1)})[None, :], [M, N])",
                f"tl.sum(tl.join({inner}, {other}), axis=2)",
                f"tl.expand_dims({self.expression(scope, 'M', depth - 1)}, 1) * {other}",
                f"(tl.dot(tl.trans(tl.trans({inner})), {self.expression(scope, 'NN', 0)}, "
                "input_precision='ieee') * 0.2)",
                f"tl.dot({self.expression(scope, 'MM', 0)}, {other}, acc={inner}, input_precision='ieee')",
            ]
            return self.pick.choice(options)
        if shape == "N":
            self.note("shape")
            return self.pick.choice(
                [f"tl.flip({inner}, 0)", f"tl.reshape({inner}, [N])", f"tl.ravel(({inner})[:, None])"]
            )
        return inner

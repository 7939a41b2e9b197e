"""Random forward files for the differentiator: `Program(seed)` has a source, shapes, and the kinds of things
in it.

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
HELPERS = """\
@triton.jit
def affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def twist(a, b):
    return a * tl.sin(b) + b


@triton.jit
def both(a, b):
    low = tl.minimum(a, b)
    return low, a + b - low * 0.5
"""

# Skeleton: the block shapes it has, its grid, and the addresses of the inputs and outputs by shape.
SHAPES = {"tiles": ["", "M", "N", "MN"], "rows": ["", "N"], "flat": ["", "N"]}


@dataclass
class Program:
    """One forward file. `features` says what is in it, for the statistics."""

    seed: int
    source: str
    sweep: list[dict[str, int]]
    features: list[str]
    dtype: str


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


def make(seed: int) -> Program:
    return _Maker(seed).program()


class _Maker:
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

    # ---- statements

    def statement(self, scope: Scope, loops: int) -> None:
        kind = self.pick.random()
        if kind < 0.5 or (loops == 0 and kind < 0.75):
            self.assign(scope)
        elif kind < 0.58:
            self.load_again(scope)
        elif kind < 0.64:
            self.pair(scope)
        elif kind < 0.75 and not self.iteration:
            self.runtime_if(scope, loops)
        elif loops:
            self.loop(scope, loops)
        else:
            self.assign(scope)

    def block(self, scope: Scope, statements: int, loops: int) -> None:
        for _ in range(statements):
            self.statement(scope, loops)

    def shape(self) -> str:
        return self.pick.choices(self.shapes, [1] * (len(self.shapes) - 1) + [3])[0]

    def assign(self, scope: Scope) -> None:
        shape = self.shape()
        old = [n for n, s in scope.names.items() if s == shape and n[0] == "v"]
        name = self.pick.choice(old) if old and self.chance(0.25) else self.fresh()
        scope.add(f"{name} = {self.expression(scope, shape, self.pick.choice([1, 2, 2, 3]))}")
        scope.names[name] = shape

    def pair(self, scope: Scope) -> None:
        """Two results at once: a helper with a tuple, or join and split."""
        shape = self.shapes[-1]
        a, b = self.fresh(), self.fresh()
        first, second = self.expression(scope, shape, 1), self.expression(scope, shape, 1)
        kind = self.pick.choice(["helper", "split", "scan"])
        self.note(kind)
        if kind == "helper":
            scope.add(f"{a}, {b} = both({first}, {second})")
        elif kind == "split":
            scope.add(f"{a}, {b} = tl.split(tl.join({first}, {second}))")
        else:
            reverse = self.pick.choice(["", ", reverse=True"])
            scope.add(
                f"_, {a} = tl.associative_scan((tl.sin({first}), {second}), {len(shape) - 1}, "
                f"affine{reverse})"
            )
            scope.add(f"{b} = {a} * 0.5")
        scope.names |= {a: shape, b: shape}

    def load_again(self, scope: Scope) -> None:
        """Another read of an input, at addresses that other lanes or programs use too."""
        name = self.fresh()
        options = [
            "y_ptr + (cols + 1) % n",
            "y_ptr + cols // 2",
            "y_ptr + n - 1 - cols",
            "y_ptr + (cols * 3) % n",
        ]
        self.note("gather")
        scope.add(
            f"{name} = tl.load({self.pick.choice(options)}, mask=cols < n, "
            f"other={self.other(scope, '')}).to(tl.float32)"
        )
        scope.names[name] = "N"

    def other(self, scope: Scope, shape: str) -> str:
        if self.chance(0.15) and any(s == shape for s in scope.names.values()) and not self.half:
            self.note("active other")
            return self.leaf(scope, shape)
        return self.pick.choice(["0.0", "0.0", "0.5"])

    def runtime_if(self, scope: Scope, loops: int) -> None:
        kind = self.pick.choice(["runtime", "program", "constexpr"])
        self.note(f"if {kind}")
        scope.add(
            {"runtime": "if n > 20:", "program": "if tl.program_id(0) % 2 == 0:", "constexpr": "if FLAG:"}[
                kind
            ]
        )
        shape = self.shape()
        name = self.fresh()
        before = [n for n, s in scope.names.items() if s == shape and n[0] == "v"]
        if before and self.chance(0.5):  # without an else
            name = self.pick.choice(before)
            inner = scope.inner()
            self.branch(inner, name, shape, loops)
            scope.lines += inner.lines
        else:
            for number in range(2):
                if number:
                    scope.add("else:")
                inner = scope.inner()
                self.branch(inner, name, shape, loops)
                scope.lines += inner.lines
        scope.names[name] = shape

    def branch(self, inner: Scope, name: str, shape: str, loops: int) -> None:
        if self.chance(0.5):
            self.block(inner, 1, loops - 1 if loops else 0)
        inner.add(f"{name} = {self.expression(inner, shape, 2)}")

    # ---- loops, one for each class of carry

    def loop(self, scope: Scope, loops: int) -> None:
        outer = self.iteration
        if outer:
            self.note("nested loop")
        kind = self.pick.choice("ABCDEFGG" if scope.depth > 1 else "0ABCDEFGG")
        self.note(f"class {kind}")
        getattr(self, {"0": "_none", "A": "_steps"}.get(kind, f"_{kind.lower()}"))(scope, loops)
        self.iteration = outer

    def header(self) -> str:
        """The head of a loop over one of the kinds of ranges; `_` stands for its variable."""
        kind = self.pick.choice(
            [
                "range(t)",
                "range(3)",
                "range(T)",
                "tl.static_range(2)",
                "range(1, t + 1)",
                "range(0, 2 * t, 2)",
            ]
        )
        self.note("runtime bound" if "t)" in kind or "t +" in kind or "* t" in kind else "static bound")
        return f"for _ in {kind}:"

    def at_step(self) -> str:
        """An index below the length of what is loaded step by step."""
        return f"({self.iteration} % t)"

    def stepped(self, inner: Scope) -> None:
        """A block that is loaded anew in each step."""
        name = self.fresh("u")
        inner.add(
            f"{name} = tl.load(u_ptr + {self.at_step()} * n + cols, mask=cols < n, other=0.0).to(tl.float32)"
        )
        inner.names[name] = "N"

    def body(self, scope: Scope, loops: int, header: str | None = None) -> Scope:
        self.iteration = self.fresh("i")
        scope.add((header or self.header()).replace("_", self.iteration, 1))
        inner = scope.inner()
        if self.chance(0.6):
            self.stepped(inner)
        if self.chance(0.4):
            self.block(inner, 1, loops - 1)
            for name in [n for n in inner.names if n in scope.names and inner.names[n] == scope.names[n]]:
                inner.names[name] = scope.names[name]
        return inner

    def carry(self, scope: Scope, start: str | None = None, shape: str | None = None) -> tuple[str, str]:
        shape = self.shape() if shape is None else shape
        name = self.fresh("c")
        scope.add(f"{name} = {start or self.expression(scope, shape, 1)}")
        scope.names[name] = shape
        return name, shape

    def close(self, scope: Scope, inner: Scope) -> None:
        scope.lines += inner.lines

    def _none(self, scope: Scope, loops: int) -> None:
        """No state: a value stored at each step."""
        shape = self.shapes[-1]
        inner = self.body(scope, loops, "for _ in range(t):")
        value = self.expression(inner, shape, 2)
        at, mask = self.element(shape)
        inner.add(f"tl.store(seq{self.loops}_ptr + {self.iteration} * size + {at}, {value}, mask={mask})")
        self.loops += 1
        self.close(scope, inner)

    def _steps(self, scope: Scope, loops: int) -> None:
        """A pointer and an integer that step."""
        pointer, number = self.fresh("p"), self.fresh("k")
        scope.add(f"{pointer} = u_ptr + cols\n{number} = 0")
        total, _ = self.carry(scope, shape="N")
        kind = self.pick.choice(["for", "while"])
        if kind == "while":
            self.note("counted while")
            scope.add(f"i{self.count + 1} = 0")
            inner = self.body(scope, loops, "while _ < t:")
        else:
            inner = self.body(scope, loops, "for _ in range(t):")
        inner.add(f"d{pointer} = tl.load({pointer}, mask=cols < n, other=0.0).to(tl.float32)")
        inner.names[f"d{pointer}"] = "N"
        inner.add(f"{total} += d{pointer} * {self.expression(inner, 'N', 1)} + 0.1 * {number}")
        inner.add(f"{pointer} += n\n{number} += 2")
        if kind == "while":
            inner.add(f"{self.iteration} += 1")
        self.close(scope, inner)

    def without(self, inner: Scope, *names: str) -> Scope:
        kept = {n: s for n, s in inner.names.items() if n not in names}
        return Scope(inner.lines, kept, inner.depth)

    def _b(self, scope: Scope, loops: int) -> None:
        """c += f(i)."""
        name, shape = self.carry(scope)
        inner = self.body(scope, loops)
        inner.add(f"{name} += {self.expression(self.without(inner, name), shape, 2)}")
        self.close(scope, inner)

    def _c(self, scope: Scope, loops: int) -> None:
        """c = a c + b with a and b free of it; the decay is learned or constant."""
        name, shape = self.carry(scope)
        inner = self.body(scope, loops)
        free = self.without(inner, name)
        decay = self.pick.choice(["0.9", f"tl.sigmoid({self.operand(free, shape, 1)})"])
        inner.add(f"{name} = {decay} * {name} + {self.expression(free, shape, 1)}")
        self.close(scope, inner)

    def _d(self, scope: Scope, loops: int) -> None:
        """An online softmax over the steps: scores per element, a value that is averaged."""
        shape = self.shapes[-1]
        zero = f"{self.leaf(scope, shape)} * 0.0"
        m, total, mean = (self.fresh("c") for _ in range(3))
        scope.add(f"{m} = {zero} - float('inf')\n{total} = {zero}\n{mean} = {zero}")
        inner = self.body(scope, loops, f"for _ in range({self.pick.choice(['t', '3'])}):")
        s, new, r, p = (self.fresh(k) for k in "snrp")
        exp = self.pick.choice(["exp", "exp2"])
        inner.add(f"{s} = {self.expression(inner, shape, 2)} + {self.operand(inner, shape, 1)}")
        inner.add(f"{new} = tl.maximum({m}, {s})\n{r} = tl.{exp}({m} - {new})\n{p} = tl.{exp}({s} - {new})")
        inner.add(f"{total} = {total} * {r} + {p}")
        inner.add(f"{mean} = {mean} * {r} + {p} * {self.expression(inner, shape, 1)}\n{m} = {new}")
        self.close(scope, inner)
        out = self.fresh()
        log = {"exp": "log", "exp2": "log2"}[exp]
        texts = [f"{mean} / {total}", f"{m} + tl.{log}({total})", f"({mean} / {total}) * {m}"]
        scope.add(f"{out} = {self.pick.choice(texts)}")
        scope.names[out] = shape

    def _e(self, scope: Scope, loops: int) -> None:
        """A running maximum or minimum."""
        name, shape = self.carry(scope)
        inner = self.body(scope, loops)
        function = self.pick.choice(["maximum", "minimum"])
        inner.add(f"{name} = tl.{function}({name}, {self.expression(self.without(inner, name), shape, 2)})")
        self.close(scope, inner)

    def _f(self, scope: Scope, loops: int) -> None:
        """c *= f."""
        name, shape = self.carry(scope)
        inner = self.body(scope, loops)
        inner.add(f"{name} *= {self.expression(self.without(inner, name), shape, 1)}")
        self.close(scope, inner)

    def _g(self, scope: Scope, loops: int) -> None:
        """A cell that is not linear, or two that feed each other."""
        name, shape = self.carry(scope)
        other = self.carry(scope, shape=shape)[0] if self.chance(0.4) else None
        inner = self.body(scope, loops)
        if self.chance(0.3):
            inner.add(f"if {self.iteration} % 2 == 0:")
            self.note("if in a loop")
            deep = inner.inner()
            deep.add(f"{name} = {self.expression(deep, shape, 1)} * 0.6")
            inner.lines += deep.lines
        inner.add(
            f"{name} = tl.sin({name} * {self.operand(inner, shape, 1)}) + {self.expression(inner, shape, 1)}"
        )
        if other is not None:
            self.note("two carries")
            inner.add(f"{other}, {name} = {name} * 0.7, {other} + {self.operand(inner, shape, 0)}")
        self.close(scope, inner)

    # ---- the file

    def element(self, shape: str) -> tuple[str, str]:
        """Address of an output element, and its mask."""
        if self.skeleton == "tiles":
            return "rows[:, None] * n + cols[None, :]", "mask"
        return ("row * n + cols" if self.skeleton == "rows" else "cols"), "cols < n"

    def columns_alone(self) -> bool:
        return self.whole or self.skeleton == "rows"

    def indices(self, scope: Scope) -> None:
        steps = "x_rows, x_cols" if self.strided and self.skeleton != "flat" else None
        across, along = ("x_rows", " * x_cols") if steps else ("n", "")
        if self.skeleton == "tiles":
            scope.add(
                "rows = row * M + tl.arange(0, M)"
                if self.persistent
                else "rows = tl.program_id(0) * M + tl.arange(0, M)"
            )
            scope.add(
                "cols = tl.arange(0, N)" if self.whole else "cols = tl.program_id(1) * N + tl.arange(0, N)"
            )
            scope.add("mask = (rows[:, None] < m) & (cols[None, :] < n)")
            at, mask = f"rows[:, None] * {across} + cols[None, :]{along}", "mask"
        elif self.skeleton == "rows":
            if not self.persistent:
                scope.add("row = tl.program_id(0)")
            scope.add("cols = tl.arange(0, N)\nmask = cols < n")
            at, mask = f"row * {across} + cols{along}", "mask"
        else:
            scope.add("cols = tl.program_id(0) * N + tl.arange(0, N)\nmask = cols < n")
            at, mask = "cols", "mask"
        cast = ".to(tl.float32)"
        scope.add(f"w = tl.load(w_ptr){cast}")
        scope.names["w"] = ""
        scope.add(f"y = tl.load(y_ptr + cols, mask=cols < n, other={self.other(scope, '')}){cast}")
        scope.names["y"] = "N"
        if self.skeleton == "tiles":
            scope.add(f"z = tl.load(z_ptr + rows, mask=rows < m, other={self.other(scope, '')}){cast}")
            scope.names["z"] = "M"
        elif self.skeleton == "rows":
            scope.add(f"z = tl.load(z_ptr + row){cast}")
            scope.names["z"] = ""
        if self.skeleton == "tiles" and self.chance(0.2):
            self.note("block pointer")
            first = "row * M" if self.persistent else "tl.program_id(0) * M"
            second = "0" if self.whole else "tl.program_id(1) * N"
            strides = "(x_rows, x_cols)" if steps else "(n, 1)"
            scope.add(
                f"xb = tl.make_block_ptr(x_ptr, shape=(m, n), strides={strides}, offsets=({first}, "
                f"{second}), "
                "block_shape=(M, N), order=(1, 0))"
            )
            scope.add(f"x = tl.load(xb, boundary_check=(0, 1), padding_option='zero'){cast}")
        else:
            scope.add(f"x = tl.load(x_ptr + {at}, mask={mask}, other={self.other(scope, '')}){cast}")
        scope.names["x"] = self.shapes[-1]

    def stores(self, scope: Scope) -> list[str]:
        """Write the results; returns the names of the outputs."""
        at, mask = self.element(self.shapes[-1])
        outputs = ["out"]
        scope.add(f"tl.store(out_ptr + {at}, {self.last(scope, self.shapes[-1])}, mask={mask})")
        if self.skeleton == "tiles" and self.chance(0.4):
            self.note("several outputs")
            write = "store" if self.whole else "atomic_add"
            outputs.append("left")
            scope.add(f"tl.{write}(left_ptr + rows, {self.last(scope, 'M')}, mask=rows < m)")
        if self.chance(0.3):
            self.note("several outputs")
            write = "store" if self.skeleton == "flat" else "atomic_add"
            self.note(write)
            outputs.append("below")
            scope.add(f"tl.{write}(below_ptr + cols, {self.last(scope, 'N')}, mask=cols < n)")
        return outputs

    def last(self, scope: Scope, shape: str) -> str:
        names = [n for n, s in scope.names.items() if s == shape]
        return " + ".join([*names[-3:], self.expression(scope, shape, 1)])

    def kernel(self) -> tuple[str, list[str]]:
        top = Scope()
        inner = top
        if self.persistent:
            self.note("persistent")
            count = "(m + M - 1) // M" if self.skeleton == "tiles" else "m"
            top.add(f"for row in range(tl.program_id(0), {count}, tl.num_programs(0)):")
            inner = top.inner()
        self.indices(inner)
        if self.chance(0.12) and not self.persistent:
            self.note("early return")
            inner.add("if tl.program_id(0) > 3:\n    return")
        if self.chance(0.1):
            self.note("dropout")
            at, _ = self.element(self.shapes[-1])
            inner.add(f"keep = tl.rand(7, {at}) > 0.3\nv0 = tl.where(keep, x / 0.7, 0.0)")
            inner.names["v0"] = self.shapes[-1]
        self.block(inner, self.pick.choice([1, 2, 3, 4]), 2)
        outputs = self.stores(inner)
        if inner is not top:
            top.lines += inner.lines
        outputs += [f"seq{i}" for i in range(self.loops)]
        params = ["x_ptr", "y_ptr", "z_ptr", "w_ptr", "u_ptr", *(f"{o}_ptr" for o in outputs)]
        params += ["m", "n", "t", "size", "x_rows", "x_cols"]
        head = (
            f"@triton.jit\ndef kernel({', '.join(params)}, M: tl.constexpr, N: tl.constexpr, T: "
            "tl.constexpr, FLAG: tl.constexpr):"
        )
        return "\n".join([head, *top.lines]), outputs

    def program(self) -> Program:
        kernel, outputs = self.kernel()
        self.note(self.skeleton)
        if self.half:
            self.note("fp16")
        wide = self.columns_alone()
        made = {
            "out": "(m, n)" if self.skeleton != "flat" else "(n,)",
            "left": "(m,)",
            "below": "(n,)",
            **{f"seq{i}": "(t, m, n)" if self.skeleton != "flat" else "(t, n)" for i in range(self.loops)},
        }
        grid = {
            "tiles": "(triton.cdiv(m, 16),)" if wide else "(triton.cdiv(m, 16), triton.cdiv(n, 16))",
            "rows": "(m,)",
            "flat": "(triton.cdiv(n, 16),)",
        }[self.skeleton]
        if self.persistent:
            grid = "(2,)" if wide else "(2, triton.cdiv(n, 16))"
        block = "triton.next_power_of_2(max(n, 16))" if wide else "16"
        x_shape = "(n,)" if self.skeleton == "flat" else "(n, m)" if self.strided else "(m, n)"
        turn = ".t()" if self.strided and self.skeleton != "flat" else ""
        sizes = "m, n = 1, x.shape[0]" if self.skeleton == "flat" else "m, n = x.shape"
        size = "n" if self.skeleton == "flat" else "m * n"
        strides = "1, 1" if self.skeleton == "flat" else "x.stride(0), x.stride(1)"
        flag = self.chance(0.5)
        buffers = "\n".join(
            f"    {o} = torch.zeros({made[o]}, device=x.device, dtype=torch.float32)" for o in outputs
        )
        sweep = self.sweep()
        source = f'''"""Program {self.seed} of the property test."""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from kernel_agent import autodiff

SWEEP = {sweep!r}


{HELPERS}

{kernel}


@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def stub(x, y, z, w, u):
    {sizes}
    t = u.shape[0]
{buffers}
    kernel[{grid}](
        x, y, z, w, u, {", ".join(outputs)}, m, n, t, {size}, {strides}, M=16, N={block}, T=2, FLAG={flag}
    )
    return {", ".join(outputs)}


def make_args(dims, device="cuda", dtype=torch.{"float16" if self.half else "float32"}):
    m, n, t = dims["M"], dims["N"], dims["T"]
    shapes = [{x_shape}, (n,), (m,), (1,), (t, n)]
    x, *rest = (3 * torch.rand(s, device=device, dtype=dtype) - 1.5 for s in shapes)
    return x{turn}, *rest
'''
        return Program(self.seed, source, sweep, sorted(self.features), "float16" if self.half else "float32")

    def sweep(self) -> list[dict[str, int]]:
        """The traced shape and others: tails, one, more and fewer programs than traced."""
        draw = self.pick.choice
        rows = ([16, 7, 17], [1, 5, 17]) if self.skeleton == "tiles" else ([2, 3], [1, 3, 5])
        return [
            {"M": draw(rows[0]), "N": draw([16, 18, 21]), "T": draw([1, 2, 3])},
            {"M": draw(rows[1]), "N": draw([1, 15, 17, 33]), "T": draw([1, 2, 4])},
        ]

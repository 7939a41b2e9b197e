"""Random statements of kernels: assignments, branches, and loops with every class of carried state."""

from __future__ import annotations

from expressions import Expressions, Scope

DOWN = [
    "range(t - 1, -1, -1)", "range(2 * t, 0, -2)", "range(t + 2, 2, -1)", "range(3, -1, -1)", "range(T, 0, -1)",
    "range(t, t - 3, -2)", "tl.range(t - 1, -1, -1)", "range(5, 5 - t, -1)",
]  # fmt: skip
OFFSETS = [
    "range(t - t // 2, t)", "range(t // 2, t)", "range(t, 2 * t)", "range(n, n + t)", "tl.range(t, t + 3)",
    "range(t // 2, t + 1, 2)", "range(t, t)",
]  # fmt: skip


class Statements(Expressions):
    """Adds the lines of statements to scopes."""

    # ---- statements

    def statement(self, scope: Scope, loops: int) -> None:
        kind = self.pick.random()
        if kind < 0.12:
            special = [self.divide, self.divide, self.dead_branch, self.dead_branch]
            if loops and not self.iteration:
                special += [self.pointer_again, self.advanced]
            self.pick.choice(special)(scope)
            return
        kind = (kind - 0.12) / 0.88
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

    def divide(self, scope: Scope) -> None:
        """A quotient, root or logarithm that is no number where the mask is off, and is not chosen there."""
        self.note("masked division")
        self.divisor = True
        shape, name = self.shapes[-1], self.fresh()
        mask, q = ("mask", "q[None, :]") if shape == "MN" else ("cols < n", "q")
        value = self.expression(scope, shape, 1)
        options = [
            f"tl.where({mask}, {value} * w / {q}, 0.0)",
            f"tl.where({mask}, {value} / {q}, 0.0)",
            f"tl.where({mask}, {value} / tl.sqrt({q}), 0.0)",
            f"tl.where({mask}, tl.log({q}) * {value}, 0.0)",
            f"tl.where({mask}, {value} * tl.rsqrt({q}), 0.0)",
            f"tl.where({mask}, {value} + tl.sqrt({q}), 0.0)",
            f"tl.where({q} == 0, 0.0, {value} / {q})",
        ]
        if shape == "MN":
            total = "tl.sum(tl.where(mask, tl.abs(x) + 0.5, 0.0), axis=1)[:, None]"
            options += [f"tl.where(mask, {value} / {total}, 0.0)"] * 3
        scope.add(f"{name} = {self.pick.choice(options)}")
        scope.names[name] = shape

    def dead_branch(self, scope: Scope) -> None:
        """What no launch asks for, and nothing could differentiate."""
        self.note("dead branch")
        shape, name = self.shapes[-1], self.fresh()
        condition = self.pick.choice(
            ["DEAD", "KIND == 'sorted'", "extra_ptr is not None", "DEAD and FLAG", "DEAD or KIND != 'plain'"]
        )
        asm = f"tl.inline_asm_elementwise('mov.b32 $0, $1;', '=r,r', [{name}], tl.float32, True, 1)"
        looped = f"    while {name}s < 9.0:\n        {name} = tl.sin({name})\n        {name}s = {name}s * 3.0"
        body = self.pick.choice(
            [
                f"{name} = tl.sort({name})",
                f"{name} = {asm}",
                f"{name} = libdevice.sinh({name})",
                f"{name}s = 1.0\n{looped}",
                f"{name} = {name} + tl.load(extra_ptr + cols * 0).to(tl.float32, bitcast=True)",
                f"{name} = tl.where({name} > 0, {name}, tl.max({name}, axis=0, return_indices=True)[1])",
            ]
        )
        scope.add(f"{name} = {self.expression(scope, shape, 1)}")
        if self.chance(0.3):
            scope.add(f"if FLAG:\n    {name} = {name} * 0.5\nelif {condition}:\n    {body}")
        else:
            scope.add(f"if {condition}:\n    {body}")
        if self.chance(0.5):
            scope.add(f"else:\n    {name} = {name} + {self.expression(scope, shape, 1)}")
        scope.names[name] = shape

    def pointer_again(self, scope: Scope) -> None:
        """One name for the pointers of two loops: stepped on, turned round, or bound anew."""
        self.note("pointer again")
        pointer, total = self.fresh("p"), self.fresh("c")
        read = f"tl.load({pointer}, mask=cols < n, other=0.0).to(tl.float32)"
        scope.add(f"{pointer} = u_ptr + cols\n{total} = {self.expression(scope, 'N', 1)}")
        scope.add(f"for {pointer}i in range(t):")
        scope.add(f"    {total} += {read} * {self.leaf(scope, 'N')}\n    {pointer} += n")
        between, second = self.pick.choice(
            [
                (f"{pointer} -= n", f"{pointer} -= n"),
                (f"{pointer} = u_ptr + cols", f"{pointer} += n"),
                (f"{pointer} = u_ptr + (t - 1) * n + cols", f"{pointer} -= n"),
                (f"{pointer} = y_ptr + cols", f"{pointer} += 0"),
                (f"{pointer} -= t * n", f"{pointer} = {pointer} + n"),
            ]
        )
        decay = self.pick.choice(["0.9 * ", "tl.sin", ""])
        scope.add(f"{between}\nfor {pointer}j in {self.pick.choice(['range(t)', 'range(t - 1, -1, -1)'])}:")
        scope.add(f"    {total} = {decay}({total}) + {read} * {self.leaf(scope, 'N')}\n    {second}")
        scope.names[total] = "N"

    def advanced(self, scope: Scope) -> None:
        """A block pointer that a loop advances."""
        self.note("advance")
        pointer, total = self.fresh("b"), self.fresh("c")
        first = (
            "0" if self.skeleton == "rows" or self.whole and self.skeleton == "tiles" else self.column_start()
        )
        start, step = self.pick.choice([("0", "1"), ("t - 1", "-1")])
        scope.add(
            f"{pointer} = tl.make_block_ptr(u_ptr, shape=(t, n), strides=(n, 1), offsets=({start}, {first}), "
            f"block_shape=(1, N), order=(1, 0))\n{total} = {self.expression(scope, 'N', 1)}"
        )
        scope.add(f"for {pointer}i in range(t):")
        block = f"tl.load({pointer}, boundary_check=(0, 1), padding_option='zero')"
        read = f"tl.reshape({block}, [N]).to(tl.float32)"
        scope.add(f"    {total} {self.pick.choice(['+=', '*=', '='])} {read} * {self.leaf(scope, 'N')}")
        scope.add(f"    {pointer} = tl.advance({pointer}, ({step}, 0))")
        scope.names[total] = "N"

    def column_start(self) -> str:
        """Where the columns of a program begin."""
        return f"tl.program_id({0 if self.skeleton == 'flat' else 1}) * N"

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
                *self.pick.choices(DOWN, k=2),
                *self.pick.choices(OFFSETS, k=2),
            ]
        )
        if kind in DOWN:
            self.note("negative step")
        elif kind in OFFSETS:
            self.note("offset bounds")
        elif kind not in ("range(3)", "range(T)", "tl.static_range(2)"):
            self.note("runtime bound")
        else:
            self.note("static bound")
        return f"for _ in {kind}:"

    def each_step(self) -> str:
        """A range over all steps, in one of both orders."""
        if self.chance(0.3):
            self.note("negative step")
            return "range(t - 1, -1, -1)"
        return "range(t)"

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
        inner = self.body(scope, loops, f"for _ in {self.each_step()}:")
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
        kind = self.pick.choice(["for", "while", "down"])
        if kind == "while":
            self.note("counted while")
            scope.add(f"i{self.count + 1} = 0")
            inner = self.body(scope, loops, "while _ < t:")
        elif kind == "down":
            self.note("counted while, downwards")
            scope.add(f"i{self.count + 1} = t")
            inner = self.body(scope, loops, "while _ > 0:")
        else:
            inner = self.body(scope, loops, f"for _ in {self.each_step()}:")
        inner.add(f"d{pointer} = tl.load({pointer}, mask=cols < n, other=0.0).to(tl.float32)")
        inner.names[f"d{pointer}"] = "N"
        inner.add(f"{total} += d{pointer} * {self.expression(inner, 'N', 1)} + 0.1 * {number}")
        inner.add(f"{pointer} += n\n{number} += 2")
        if kind == "while":
            inner.add(f"{self.iteration} += 1")
        elif kind == "down":
            inner.add(f"{self.iteration} -= 1")
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
        inner = self.body(scope, loops, f"for _ in {self.pick.choice([self.each_step(), 'range(3)'])}:")
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

"""Random host functions for the differentiator: `make(seed)` is a forward file whose stub launches small
kernels in one of the many ways that people write.

A step takes values that the host has (named tensors, their shape in letters: "MN", "NM", "M", "N") and makes
others, by launches or by torch. How a buffer is allocated, a grid spelled, an argument passed is drawn anew
each time; steps are put into branches (by size, by a flag, by an argument that is None), loops and helper
functions. SWEEP has sizes and flags on both sides of the branches.
"""

from __future__ import annotations

import ast
import builtins
import random
from dataclasses import dataclass, field

import wrapper_kernels
from generate import Program

SIDES = {"M": "m", "N": "n"}
CONDITIONS = [
    "n > 18",
    "m * n > 60",
    "m > 3",
    "n % 2 == 0",
    "flag",
    "not flag",
    "b is None",
    "mode == 'plain'",
]


@dataclass
class Value:
    """A tensor that the host has."""

    name: str
    shape: str
    dense: bool = True  # row-major
    own: bool = False  # made here, and nothing else sees its memory


@dataclass
class Lines:
    """A piece of the host function, and what it makes."""

    lines: list[str] = field(default_factory=list)
    made: list[Value] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.lines += text.splitlines()

    def indented(self) -> list[str]:
        return ["    " + line for line in self.lines]


def make(seed: int) -> Program:
    return _Maker(seed).program()


class _Maker:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.pick = random.Random(f"wrapper {seed}")
        self.features: dict[str, None] = {}
        self.kernels: list[str] = []
        self.names: dict[str, str] = {}  # kernels by name: their kind
        self.helpers: list[str] = []
        self.count = 0
        self.values: list[Value] = []

    def note(self, feature: str) -> None:
        self.features[feature] = None

    def chance(self, share: float) -> bool:
        return self.pick.random() < share

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    # ---- values and buffers

    def value(self, shape: str) -> Value:
        """One of the host's values of a shape, later ones rather than earlier ones."""
        found = [v for v in self.values if v.shape == shape]
        return self.pick.choice(found[-3:] if self.chance(0.7) else found)

    def dense(self, value: Value, into: Lines) -> str:
        """A row-major tensor with its values."""
        if value.dense:
            return value.name
        self.note("contiguous")
        if self.chance(0.5):
            return f"{value.name}.contiguous()"
        name = self.fresh("t")
        into.add(f"{name} = {value.name}.contiguous()")
        return name

    def size(self, shape: str) -> str:
        sides = [SIDES[letter] for letter in shape]
        return f"({', '.join(sides)}{',' * (len(sides) == 1)})"

    def buffer(self, into: Lines, shape: str, like: str, zero: bool = False) -> str:
        """A new tensor, allocated in one of many ways; `like` is a row-major tensor's name."""
        name = self.fresh("y")
        size = self.size(shape)
        kind = f"device={like}.device, dtype={like}.dtype"
        options = [
            f"torch.zeros({size}, {kind})",
            f"{like}.new_zeros({size})",
            f"torch.full({size}, 0.0, {kind})",
        ]
        if not zero:
            strides = "(n, 1)" if shape == "MN" else "(m, 1)" if shape == "NM" else "(1,)"
            options += [
                f"torch.empty({size}, {kind})", f"{like}.new_empty({size})",
                f"torch.empty_strided({size}, {strides}, {kind})", f"torch.empty({size}, {kind})",
            ]  # fmt: skip
        into.add(f"{name} = {self.pick.choice(options)}")
        return name

    # ---- launches

    def kernel(self, kind: str) -> str:
        """A kernel of a kind: a new one, or one that is there."""
        there = [name for name, other in self.names.items() if other == kind]
        if there and self.chance(0.5):
            self.note("kernel launched twice")
            return self.pick.choice(there)
        name = f"{kind}_kernel{len(self.names)}"
        self.names[name] = kind
        self.kernels.append(wrapper_kernels.text(kind, name, self.pick))
        return name

    def grid(self, into: Lines, entries: list[str], block: str) -> str:
        """A spelling of the grid."""
        kind = self.pick.choice(["tuple", "tuple", "triple", "lambda", "name", "list"])
        if kind == "triple":
            self.note("grid triple")
            entries = [*entries, *["1"] * (3 - len(entries))]
        text = f"({', '.join(entries)}{',' * (len(entries) == 1)})"
        if kind == "lambda":
            self.note("grid lambda")
            return f"lambda meta: {text}".replace(f", {block})", ", meta['BLOCK'])")
        if kind == "name":
            name = self.fresh("grid")
            into.add(f"{name} = {text}")
            return name
        return f"[{', '.join(entries)}]" if kind == "list" else text

    def launch(self, into: Lines, kind: str, given: dict[str, str], grid: list[str]) -> None:
        """`kernel[grid](...)` with the arguments positional, by keyword, unpacked, or mixed."""
        names = wrapper_kernels.parameters(kind)
        spelled = self.grid(into, grid, given["BLOCK"])
        first = self.pick.choice([len(names) - 1, len(names) - 1, 0, 1, 2])
        while first < len(names) and names[first].islower() and self.chance(0.3):
            first += 1
        first = min(first, next((i for i, n in enumerate(names) if n.isupper()), len(names)))
        positional = [given[name] for name in names[:first]]
        keywords = {name: given[name] for name in names[first:]}
        parts = list(positional)
        if len(positional) > 2 and self.chance(0.15):
            self.note("unpacked tuple")
            name = self.fresh("args")
            into.add(f"{name} = ({', '.join(positional[1:])},)")
            parts = [positional[0], f"*{name}"]
        order = list(keywords.items())
        if self.chance(0.3):
            self.pick.shuffle(order)
        if self.chance(0.2):
            self.note("unpacked dictionary")
            name, keep = self.fresh("meta"), self.pick.randrange(len(order) + 1)
            pairs = ", ".join(f'"{key}": {text}' for key, text in order[keep:])
            into.add(f"{name} = {{{pairs}}}")
            parts += [f"{key}={text}" for key, text in order[:keep]] + [f"**{name}"]
        else:
            parts += [f"{key}={text}" for key, text in order]
        if first == 0:
            self.note("keyword launch")
        if self.chance(0.15):
            parts.append("num_warps=4")
        into.add(f"{self.kernel(kind)}[{spelled}]({', '.join(parts)})")

    def flat(self, into: Lines, kind: str, given: dict[str, str], total: str) -> None:
        """A launch over all elements of a row-major tensor."""
        block = self.pick.choice(["16", "32", "64"])
        given |= {"total": f"{total}.numel()", "BLOCK": block}
        self.launch(into, kind, given, [f"triton.cdiv({total}.numel(), {block})"])

    def by_rows(self, into: Lines, kind: str, source: Value, given: dict[str, str]) -> None:
        """A launch of a program a row, of a tensor of any strides."""
        rows, columns = (SIDES[letter] for letter in source.shape)
        given |= {
            "x_ptr": source.name, "n": columns, "x_rows": f"{source.name}.stride(0)", "x_cols": f"{source.name}.stride(1)",
            "BLOCK": f"triton.next_power_of_2({columns})",
        }  # fmt: skip
        self.launch(into, kind, given, [rows])

    # ---- steps that launch

    def optional(self, shape: str) -> str:
        """A row-major tensor, or None."""
        there = [v.name for v in self.values if v.shape == shape and v.dense]
        kind = self.pick.choice(["none", "there", "sometimes"])
        if kind == "none" or not there:
            self.note("None argument")
            return "None"
        name = self.pick.choice(there)
        if kind == "sometimes":
            self.note("sometimes None")
            return f"{name} if {self.pick.choice(CONDITIONS)} else None"
        return name

    def map(self, shape: str) -> Lines:
        piece = Lines()
        source = self.value(shape)
        x = self.dense(source, piece)
        y = self.buffer(piece, shape, x)
        self.flat(piece, "map", {"x_ptr": x, "y_ptr": y}, x if self.chance(0.5) else y)
        piece.made.append(Value(y, shape, own=True))
        return piece

    def mix(self, shape: str) -> Lines:
        piece = Lines()
        x = self.dense(self.value(shape), piece)
        y = self.buffer(piece, shape, x)
        kind = self.pick.choice(["mix", "flagged"])
        given = {
            "x_ptr": x,
            "y_ptr": y,
            "s_ptr": self.optional(shape),
            "scale": self.pick.choice(["0.8", "scale", "n**-0.5"]),
        }
        if kind == "flagged":
            s = self.fresh("s")
            piece.add(f"{s} = {given['s_ptr']}")
            given |= {
                "s_ptr": s,
                "HAS_S": f"{s} is not None",
                "MODE": self.pick.choice(["mode", "'plain'", "'other'"]),
            }
        self.flat(piece, kind, given, y)
        piece.made.append(Value(y, shape, own=True))
        return piece

    def bias(self, shape: str) -> Lines:
        piece = Lines()
        source = self.value(shape)
        y = self.buffer(piece, shape, source.name)
        b = "b" if shape == "MN" and self.chance(0.6) else self.optional(shape[1])
        self.by_rows(piece, "bias", source, {"b_ptr": b, "y_ptr": y})
        piece.made.append(Value(y, shape, own=True))
        return piece

    def reduced(self, shape: str) -> Lines:
        piece = Lines()
        source = self.value(shape)
        kind = self.pick.choice(["row_sum", "col_sum"])
        left = shape[0] if kind == "row_sum" else shape[1]
        y = self.buffer(piece, left, source.name, zero=kind == "col_sum")
        self.by_rows(piece, kind, source, {"y_ptr": y})
        piece.made.append(Value(y, left, own=True))
        return piece

    def softmax(self, shape: str) -> Lines:
        piece = Lines()
        source = self.value(shape)
        y = self.buffer(piece, shape, source.name)
        lse = "None"
        kind = self.pick.choice(["none", "there", "flag"])
        if kind != "none":
            lse = self.buffer(piece, shape[0], source.name)
        if kind == "flag":
            self.note("optional output")
            piece.lines[-1] += " if flag else None"
        elif kind == "there":
            piece.made.append(Value(lse, shape[0], own=True))
        else:
            self.note("None argument")
        self.by_rows(piece, "softmax", source, {"y_ptr": y, "lse_ptr": lse})
        if kind == "flag":
            name = self.fresh("v")
            piece.add(f"{name} = {y} * 0.5 if {lse} is None else {y} + {lse}[:, None]")
            piece.made.append(Value(name, shape))
        piece.made.append(Value(y, shape, own=True))
        return piece

    def matmul(self, shape: str) -> Lines:
        """(M, N) x (N, M) x (M, N), of which only the last is kept: two launches through a square tensor."""
        piece = Lines()
        a, b = self.value(shape), self.value(shape[::-1])
        c = self.buffer(piece, shape, a.name)
        square = self.fresh("q")
        rows, columns = (SIDES[letter] for letter in shape)
        piece.add(f"{square} = torch.empty(({rows}, {rows}), device={a.name}.device, dtype={a.name}.dtype)")
        for left, right, out, width, inner in (
            (a.name, b.name, square, rows, columns),
            (square, a.name, c, columns, rows),
        ):
            given = {
                "a_ptr": left,
                "b_ptr": right,
                "c_ptr": out,
                "rows": rows,
                "columns": width,
                "inner": inner,
                "BLOCK": "16",
            }
            for key, name in (("a", left), ("b", right)):
                given |= {f"{key}_rows": f"{name}.stride(0)", f"{key}_cols": f"{name}.stride(1)"}
            self.launch(piece, "matmul", given, [f"triton.cdiv({rows}, 16)", f"triton.cdiv({width}, 16)"])
        piece.made.append(Value(c, shape, own=True))
        return piece

    def gather(self, shape: str) -> Lines:
        piece = Lines()
        x = self.dense(self.value("MN"), piece)
        y = self.buffer(piece, "MN", x)
        given = {"x_ptr": x, "index_ptr": "index", "y_ptr": y, "n": "n", "BLOCK": "triton.next_power_of_2(n)"}
        self.launch(piece, "gather", given, ["m"])
        piece.made.append(Value(y, "MN", own=True))
        return piece

    def inplace(self, shape: str) -> Lines:
        """A launch that overwrites what a launch or torch has made here."""
        piece = Lines()
        found = [v for v in self.values if v.own and v.dense and v.shape == shape]
        if found and self.chance(0.6):
            y = self.pick.choice(found).name
            self.note("in place on a launch's output")
        else:
            y = self.fresh("y")
            copied = self.pick.choice(
                ["{}.clone()", "{} * 1.0", "{} + 0.0", "torch.empty_like({0}).copy_({0})"]
            )
            piece.add(f"{y} = {copied.format(self.dense(self.value(shape), piece))}")
            piece.made.append(Value(y, shape, own=True))
        for _ in range(self.pick.choice([1, 1, 2])):
            self.flat(piece, "inplace", {"y_ptr": y, "scale": self.pick.choice(["0.9", "scale"])}, y)
        if not piece.made:  # a name to be put out
            name = self.fresh("v")
            piece.add(f"{name} = {y} * 1.5")
            piece.made.append(Value(name, shape))
        return piece

    def accumulated(self, shape: str) -> Lines:
        """Two launches into one buffer."""
        piece = Lines()
        x = self.dense(self.value(shape), piece)
        y = self.buffer(piece, shape, x, zero=True)
        for _ in range(2):
            source = self.dense(self.value(shape), piece)
            self.flat(piece, self.pick.choice(["added", "atomic"]), {"x_ptr": source, "y_ptr": y}, y)
        piece.made.append(Value(y, shape, own=True))
        return piece

    def lines_of(self, shape: str) -> Lines:
        """A launch a row, in a loop of the host: rows are views, or have offsets."""
        piece = Lines()
        x = self.dense(self.value(shape), piece)
        if not x.isidentifier():
            name = self.fresh("t")
            piece.add(f"{name} = {x}")
            x = name
        y = self.buffer(piece, shape, x, zero=self.chance(0.5))
        rows, columns = (SIDES[letter] for letter in shape)
        step = Lines()
        how = self.pick.choice(["views", "offsets", "input view", "slices"])
        self.note(f"rows by {how}")
        first = "0" if how in ("views", "slices") else f"i * {columns}"
        given = {
            "x_ptr": x,
            "y_ptr": y,
            "first": first,
            "n": columns,
            "BLOCK": f"triton.next_power_of_2({columns})",
        }
        if how == "views":
            given |= {"x_ptr": f"{x}[i]", "y_ptr": f"{y}[i]"}
        elif how == "slices":
            given |= {"x_ptr": f"{x}[i : i + 1]", "y_ptr": f"{y}[i : i + 1]"}
        elif how == "input view":
            given |= {"x_ptr": f"{x}.view(-1)"}
        self.launch(step, "line", given, ["1"])
        piece.add(f"for i in range({rows}):")
        piece.lines += step.indented()
        piece.made.append(Value(y, shape, own=True))
        return piece

    def two(self, shape: str) -> Lines:
        piece = Lines()
        x = self.dense(self.value(shape), piece)
        y, z = self.buffer(piece, shape, x), self.buffer(piece, shape, x)
        self.flat(piece, "two", {"x_ptr": x, "y_ptr": y, "z_ptr": z}, y)
        kept = [Value(y, shape, own=True), Value(z, shape, own=True)]
        piece.made += kept if self.chance(0.6) else kept[: 1 + self.pick.randrange(2)]
        return piece

    def twice_the_same(self, shape: str) -> Lines:
        """One tensor for two parameters."""
        piece = Lines()
        self.note("one tensor twice")
        x = self.dense(self.value(shape), piece)
        if not x.isidentifier():
            piece.add(f"t{self.count}t = {x}")
            x = f"t{self.count}t"
        y = self.buffer(piece, shape, x)
        self.flat(piece, "mix", {"x_ptr": x, "s_ptr": x, "y_ptr": y, "scale": "1.0"}, y)
        piece.made.append(Value(y, shape, own=True))
        return piece

    # ---- steps of torch

    def torch_step(self, shape: str) -> Lines:
        """What torch does between launches."""
        piece = Lines()
        name = self.fresh("v")
        source = self.value(shape)
        other = self.value(shape)
        wide, narrow = self.pick.choice(
            [("double", "float"), ("half", "float"), ("to(torch.float64)", "to(torch.float32)")]
        )
        if "(" not in wide:
            wide, narrow = f"{wide}()", f"{narrow}()"
        options = [
            (f"{source.name}.t()", shape[::-1], False, "transpose"),
            (f"{source.name}.t().contiguous()", shape[::-1], True, "transpose"),
            (f"{source.name}.transpose(0, 1)", shape[::-1], False, "transpose"),
            (f"{source.name}.reshape(-1).view({SIDES[shape[0]]}, {SIDES[shape[1]]})", shape, True, "reshape"),
            (f"{source.name} * {other.name}", shape, False, "torch arithmetic"),
            (f"torch.tanh({source.name})", shape, False, "torch arithmetic"),
            (f"({source.name} + {other.name}).contiguous()", shape, True, "torch arithmetic"),
            (f"{source.name}.{wide}.{narrow}", shape, False, "cast"),
            (f"{self.value(shape[1]).name}.expand({SIDES[shape[0]]}, {SIDES[shape[1]]}).contiguous()", shape, True, "expand"),
            (f"{self.value(shape[1]).name}.expand({SIDES[shape[0]]}, {SIDES[shape[1]]})", shape, False, "expand"),
            (f"{self.value(shape[0]).name}[:, None] * {source.name}", shape, False, "broadcast"),
            (f"{source.name} if {self.pick.choice(CONDITIONS)} else {other.name}", shape, False, "choice of tensors"),
            (f"{source.name} if {self.pick.choice(CONDITIONS)} else torch.ones_like({source.name})", shape, False, "constant at some sizes"),
            (f"{source.name}.detach()", shape, False, "detach"),
            (f"{source.name}.flatten().unflatten(0, {self.size(shape)})", shape, True, "reshape"),
            (f"torch.cat([{source.name}[:1], {other.name}[1:]])", shape, False, "cat"),
            (f"{source.name}.flip(0)", shape, False, "torch arithmetic"),
        ]  # fmt: skip
        text, made, dense, feature = self.pick.choice(options)
        self.note(feature)
        piece.add(f"{name} = {text}")
        piece.made.append(Value(name, made, dense))
        return piece

    # ---- steps in branches, loops and helpers

    def simple(self, shape: str) -> Lines:
        kinds = [
            (self.map, 3), (self.mix, 3), (self.bias, 2), (self.reduced, 1), (self.softmax, 2), (self.matmul, 1),
            (self.gather, 1), (self.inplace, 2), (self.accumulated, 1), (self.lines_of, 1), (self.two, 1),
            (self.twice_the_same, 0.5), (self.torch_step, 3),
        ]  # fmt: skip
        kind = self.pick.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
        self.note(kind.__name__)
        return kind(shape)

    def same(self, shape: str, count: int) -> list[Lines]:
        """Pieces that each make one value of a shape under one name."""
        name = self.fresh("v")
        pieces = []
        for _ in range(count):
            piece = self.pick.choice(
                [self.map, self.mix, self.bias, self.softmax, self.lines_of, self.torch_step]
            )(shape)
            made = next((v for v in piece.made if v.shape == shape), None)
            if made is None:
                source = self.value(shape)
                made = Value(f"{source.name} * 2.0", shape)
            piece.add(f"{name} = {made.name}")
            piece.made = [Value(name, shape, dense=False)]
            pieces.append(piece)
        return pieces

    def branch(self, shape: str) -> Lines:
        """One of two or three ways, by size or by an argument."""
        self.note("branch")
        ways = self.same(shape, self.pick.choice([2, 2, 3]))
        conditions = self.pick.sample(CONDITIONS, len(ways) - 1)
        whole = Lines(made=ways[0].made)
        for word, way in zip([*(f"if {c}:" for c in conditions), "else:"], ways, strict=True):
            whole.add(
                word if not whole.lines else word.replace("if ", "elif ", 1) if word != "else:" else word
            )
            whole.lines += way.indented()
        return whole

    def only_if(self, shape: str) -> Lines:
        """Something on top, for some sizes."""
        self.note("branch without else")
        source = self.value(shape)
        (way,) = self.same(shape, 1)
        name = way.made[0].name
        whole = Lines([f"{name} = {source.name}", f"if {self.pick.choice(CONDITIONS)}:"], way.made)
        whole.lines += way.indented()
        return whole

    def repeated(self, shape: str) -> Lines:
        """A loop that feeds a launch its own result."""
        self.note("loop of launches")
        name = self.fresh("v")
        start = self.value(shape)
        kept = self.values
        self.values = [*kept, Value(name, shape, dense=False)]
        step = self.pick.choice([self.map, self.mix, self.bias])(shape)
        self.values = kept
        times = self.pick.choice(["2", "3", "m % 3", "1 + n % 2", "steps"])
        whole = Lines([f"{name} = {start.name}", f"for _ in range({times}):"])
        whole.lines += step.indented()
        whole.lines.append(f"    {name} = {step.made[-1].name}")
        whole.made.append(Value(name, shape, dense=False))
        return whole

    def helper(self, piece: Lines) -> Lines:
        """The same in a function of its own, which may return early."""
        self.note("helper")
        name = self.fresh("helper")
        made = piece.made
        body = list(piece.lines)
        results = ", ".join(v.name for v in made)
        if len(made) == 1 and self.chance(0.5) and made[0].shape in ("MN", "NM"):
            self.note("early return")
            ways = self.same(made[0].shape, 1)
            condition = self.pick.choice(CONDITIONS)
            body = [f"if {condition}:", *ways[0].indented(), f"    return {ways[0].made[0].name}", *body]
            made = [Value(made[0].name, made[0].shape, dense=False)]
        body.append(f"return {results}")
        free = self.free(body)
        text = "\n".join(f"    {line}" for line in body)
        self.helpers.append(f"def {name}({', '.join(free)}):\n{text}\n")
        given = ", ".join(f"{n}={n}" if self.chance(0.2) else n for n in free)
        if "=" in given:
            given = ", ".join(f"{n}={n}" for n in free)
        return Lines([f"{results} = {name}({given})"], made)

    def free(self, body: list[str]) -> list[str]:
        """The names that lines take from around them."""
        names = [n for n in ast.walk(ast.parse("\n".join(body))) if isinstance(n, ast.Name)]
        bound = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {"torch", "triton", "tl", "meta"}
        return sorted({n.id for n in names if not hasattr(builtins, n.id)} - bound - set(self.names))

    def step(self) -> Lines:
        shape = self.pick.choice(["MN", "MN", "NM"])
        kind = self.pick.random()
        if kind < 0.16:
            piece = self.branch(shape)
        elif kind < 0.22:
            piece = self.only_if(shape)
        elif kind < 0.3:
            piece = self.repeated(shape)
        else:
            piece = self.simple(shape)
        if self.chance(0.25) and piece.made:
            piece = self.helper(piece)
        return piece

    # ---- the file

    def program(self) -> Program:
        turned = self.chance(0.2)
        self.values = [Value("x", "MN", dense=not turned), Value("w", "N"), Value("z", "M"), Value("u", "NM")]
        body: list[str] = []
        for _ in range(self.pick.choice([2, 2, 3, 3, 4, 5])):
            piece = self.step()
            body += piece.lines
            self.values += piece.made
        if not self.kernels:
            piece = self.map("MN")
            body += piece.lines
            self.values += piece.made
        returned = self.returned()
        sweep = self.sweep()
        stub = "\n".join(f"    {line}" for line in body)
        helpers = "\n\n".join(self.helpers) + "\n\n" * bool(self.helpers)
        x = (
            "torch.rand((n, m), device=device, dtype=dtype).t()"
            if turned
            else "torch.rand((m, n), device=device, dtype=dtype)"
        )
        source = f'''"""Wrapper {self.seed} of the property test."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = {sweep!r}


{chr(10).join(k + chr(10) for k in self.kernels)}
{helpers}
@autodiff(inputs_require_grad=(0, 1, 2, 3, 4))
def stub(x, w, z, u, b=None, *, index, flag=False, mode="plain", scale=0.75, steps=2):
    m, n = x.shape
{stub}
    return {returned}


def make_args(dims, device="cuda", dtype=torch.float32):
    m, n = dims["M"], dims["N"]
    shapes = [(n,), (m,), (n, m), (n,)]
    x = 3 * {x} - 1.5
    w, z, u, b = (3 * torch.rand(s, device=device, dtype=dtype) - 1.5 for s in shapes)
    index = torch.randint(0, m, (m,), device=device)
    options = {{"index": index, "flag": dims["FLAG"], "mode": dims["MODE"]}}
    if dims["MODE"] == "other":
        options["steps"] = 1
    return (x, w, z, u, b if dims["BIAS"] else None), options
'''
        return Program(self.seed, source, sweep, sorted(self.features), "float32")

    def returned(self) -> str:
        made = [v for v in self.values if v.name not in ("x", "w", "z", "u")]
        names = [v.name for v in made[-1:]]
        names += [
            v.name for v in self.pick.sample(made[:-1], min(len(made) - 1, self.pick.choice([0, 0, 1, 2])))
        ]
        text = [f"{name} * 1.0" if self.chance(0.1) else name for name in names]
        if self.chance(0.15):
            self.note("output that is None")
            text.append(self.pick.choice(["None", f"{names[0]}.sum(0) if flag else None"]))
        return ", ".join(text)

    def sweep(self) -> list[dict[str, int]]:
        """The traced sizes and flags, and others on the other side of branches."""
        draw = self.pick.choice
        sizes = [(4, 16), (2, 20), (5, 33), (1, 7), (7, 13), (3, 18), (17, 19)]
        made = []
        for m, n in self.pick.sample(sizes, 3):
            flags = {"FLAG": self.chance(0.5), "MODE": draw(["plain", "other"]), "BIAS": self.chance(0.5)}
            made.append({"M": m, "N": n, **flags})
        return made

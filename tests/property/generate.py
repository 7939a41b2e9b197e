"""Random forward files for the differentiator: `Program(seed)` has a source, shapes, and the kinds of things
in it. What a kernel consists of is drawn in statements.py and expressions.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from expressions import Scope
from statements import Statements

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


@dataclass
class Program:
    """One forward file. `features` says what is in it, for the statistics."""

    seed: int
    source: str
    sweep: list[dict[str, int]]
    features: list[str]
    dtype: str


def make(seed: int) -> Program:
    return _Maker(seed).program()


class _Maker(Statements):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.axes = self.pick.choices([(0, 1), (1, 0), (1, 2), (2, 0), (0, 2)], [12, 1, 1, 1, 1])[0]
        self.constant = self.chance(0.2)  # strides are constexprs
        self.wide = self.pick.choices(["", "rows", "cols", "both"], [6, 1, 1, 1])[0]  # in 64 bits
        if self.chance(0.12):
            self.inplace = self.pick.choice(["same pointer", "two pointers"])

    # ---- the file

    def offset(self, text: str, what: str) -> str:
        """An index, maybe in 64 bits."""
        if self.wide not in (what, "both"):
            return text
        self.note("int64 offsets")
        return f"({text}).to(tl.int64)"

    def element(self, shape: str) -> tuple[str, str]:
        """Address of an output element, and its mask."""
        if self.skeleton == "tiles":
            return "rows[:, None] * n + cols[None, :]", "mask"
        return ("row * n + cols" if self.skeleton == "rows" else "cols"), "cols < n"

    def columns_alone(self) -> bool:
        return self.whole or self.skeleton == "rows"

    def indices(self, scope: Scope) -> None:
        steps = self.strided and self.skeleton != "flat"
        across, along = ("x_rows", " * x_cols") if steps else ("n", "")
        columns = "tl.arange(0, N)"
        if self.skeleton == "tiles":
            first = "row * M" if self.persistent else "tl.program_id(0) * M"
            scope.add(f"rows = {self.offset(f'{first} + tl.arange(0, M)', 'rows')}")
            columns = columns if self.whole else f"tl.program_id(1) * N + {columns}"
            scope.add(f"cols = {self.offset(columns, 'cols')}")
            scope.add("mask = (rows[:, None] < m) & (cols[None, :] < n)")
            at, mask = f"rows[:, None] * {across} + cols[None, :]{along}", "mask"
        elif self.skeleton == "rows":
            if not self.persistent:
                scope.add(f"row = {self.offset('tl.program_id(0)', 'rows')}")
            scope.add(f"cols = {self.offset(columns, 'cols')}\nmask = cols < n")
            at, mask = f"row * {across} + cols{along}", "mask"
        else:
            scope.add(f"cols = {self.offset(f'tl.program_id(0) * N + {columns}', 'cols')}\nmask = cols < n")
            at, mask = "cols", "mask"
        self.at = at
        self.inputs(scope, at, mask)

    def inputs(self, scope: Scope, at: str, mask: str) -> None:
        """The loads that a program begins with."""
        steps = self.strided and self.skeleton != "flat"
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
        if self.inplace:
            self.note(f"in place, {self.inplace}")
            base, at = ("x_ptr" if self.inplace == "same pointer" else "out_ptr"), self.at
            outputs = [] if self.inplace == "same pointer" else outputs
        else:
            base = "out_ptr"
        value = self.last(scope, self.shapes[-1])
        tiles = self.skeleton == "tiles" and not self.inplace and not self.persistent
        if tiles and self.chance(0.15):
            self.note("store through a block pointer")
            second = "0" if self.whole else "tl.program_id(1) * N"
            scope.add(
                "ob = tl.make_block_ptr(out_ptr, (m, n), (n, 1), "
                f"(tl.program_id(0) * M, {second}), (M, N), (1, 0))"
            )
            scope.add(f"tl.store(ob, {value}, boundary_check=(0, 1))")
        else:
            scope.add(f"tl.store({base} + {at}, {value}, mask={mask})")
        if self.inplace and self.chance(0.25):
            self.note("load after store")
            scope.add(f"again = tl.load({base} + {at}, mask={mask}, other=0.0).to(tl.float32)")
            scope.names["again"] = self.shapes[-1]
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
        loads = len(inner.lines)
        self.block(inner, self.pick.choice([1, 2, 3, 4]), 2)
        if self.divisor:  # zero where the mask is off
            pad = "    " * inner.depth
            inner.lines.insert(
                loads, f"{pad}q = tl.load(q_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)"
            )
        outputs = self.stores(inner)
        if inner is not top:
            top.lines += inner.lines
        outputs += [f"seq{i}" for i in range(self.loops)]
        params = [
            "x_ptr",
            "y_ptr",
            "z_ptr",
            "w_ptr",
            "u_ptr",
            "q_ptr",
            "extra_ptr",
            *(f"{o}_ptr" for o in outputs),
        ]
        stride = ": tl.constexpr" * self.constant
        if self.constant and self.strided:
            self.note("constant strides")
        params += ["m", "n", "t", "size", f"x_rows{stride}", f"x_cols{stride}"]
        constants = ["M", "N", "T", "FLAG", "DEAD", "KIND"]
        params += [f"{name}: tl.constexpr" for name in constants]
        lines = [self.turned(line) for line in top.lines]
        return "\n".join([f"@triton.jit\ndef kernel({', '.join(params)}):", *lines]), outputs

    def turned(self, line: str) -> str:
        """With the axes of the grid that this program has."""
        return re.sub(
            r"(program_id|num_programs)\((\d)\)",
            lambda found: f"{found[1]}({self.axes[int(found[2])]})",
            line,
        )

    def grid(self, entries: list[str]) -> str:
        """A spelling of the grid, its axes where they belong."""
        if self.axes == (0, 1) and self.chance(0.7):
            return f"({', '.join(entries)}{',' * (len(entries) == 1)})"
        self.note("grid triple")
        axes = ["1", "1", "1"]
        for axis, entry in zip(self.axes, entries, strict=False):
            axes[axis] = entry
        text = f"({', '.join(axes)})"
        return self.pick.choice([text, f"[{text[1:-1]}]", f"lambda meta: {text}"])

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
        count, across = "triton.cdiv(m, 16)", "triton.cdiv(n, 16)"
        entries = {"tiles": [count] if wide else [count, across], "rows": ["m"], "flat": [across]}[
            self.skeleton
        ]
        if self.persistent:
            entries = ["2"] if wide else ["2", across]
        block = "triton.next_power_of_2(max(n, 16))" if wide else "16"
        x_shape = "(n,)" if self.skeleton == "flat" else "(n, m)" if self.strided else "(m, n)"
        turn = ".t()" if self.strided and self.skeleton != "flat" else ""
        sizes = "m, n = 1, x.shape[0]" if self.skeleton == "flat" else "m, n = x.shape"
        size = "n" if self.skeleton == "flat" else "m * n"
        strides = "1, 1" if self.skeleton == "flat" else "x.stride(0), x.stride(1)"
        flag = self.chance(0.5)
        zeros = "torch.zeros({}, device=x.device, dtype=torch.float32)"
        new = {o: zeros.format(made[o]) for o in outputs}
        returned = outputs
        if self.inplace:
            copied = self.pick.choice(["x.clone()", "x * 1.0", "x + 0.0"])
            new = {"x": copied, **new, **({"out": "x"} if "out" in outputs else {})}
            returned = outputs if "out" in outputs else ["x", *outputs]
        given = ", ".join(outputs) + "," * bool(outputs)
        buffers = "\n".join(f"    {name} = {value}" for name, value in new.items())
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
    kernel[{self.grid(entries)}](
        x, y, z, w, u, {"y.abs() + 0.7" if self.divisor else "None"}, None, {given}
        m, n, t, {size}, {strides}, M=16, N={block}, T=2, FLAG={flag}, DEAD=False, KIND="plain"
    )
    return {", ".join(returned)}


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

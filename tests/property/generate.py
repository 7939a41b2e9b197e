"""Random forward files for the differentiator: `Program(seed)` has a source, shapes, and the kinds of things
in it. What a kernel consists of is drawn in statements.py and expressions.py.
"""

from __future__ import annotations

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

"""Where loops are split into masked and whole steps: against all lanes, in numbers that wrap."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import Carry, For, Node, TapeStore, nodes_in
from kernel_agent.differentiate.ir.values import loop_out
from kernel_agent.differentiate.schedule import split_loops, whole_steps

COMPARE = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}


@dataclass
class Number:
    """What a kernel computes: so many bits, and Python's own where they are None."""

    value: Any
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits is not None:
            half = 2 ** (self.bits - 1)
            self.value = (self.value + half) % (2 * half) - half


def typed(value: int) -> Number:
    """An argument, as Triton types it."""
    return Number(value, 32 if -(2**31) <= value < 2**31 else 64)


class Machine:
    """Computes nodes as a compiled kernel does."""

    def __init__(self, given: dict[Node, Number]) -> None:
        self.given = dict(given)

    def of(self, node: Node) -> Number:
        if node not in self.given:
            self.given[node] = self._of(node)
        return self.given[node]

    def _of(self, node: Node) -> Number:
        if node.op == "const":
            return Number(node.value)
        if node.op in ("select", "ifout"):
            cond, a, b = (
                node.args if node.op == "select" else (*node.args, node.attrs["then"], node.attrs["other"])
            )
            return self.of(a if self.of(cond).value else b)
        if node.op == "where":
            cond, a, b = map(self.of, node.args)
            return Number(a.value if cond.value else b.value, max(a.bits or 32, b.bits or 32))
        args = [self.of(arg) for arg in node.args]
        values = [arg.value for arg in args]
        bits = max((arg.bits for arg in args if arg.bits), default=None)
        if node.op == "compare":
            return Number(COMPARE[node.attrs["cmp"]](*values))
        if node.op == "and":
            return Number(np.logical_and(*values))
        if node.op in ("cast", "user"):
            return Number(values[0], 64 if node.dtype == "int64" else 32)
        if node.op == "arange":
            return Number(np.arange(values[1]).astype(object), 32)
        if node.op == "expand":
            return Number(np.expand_dims(values[0], node.attrs["axis"]), args[0].bits)
        if node.op == "neg":
            return Number(-values[0], bits)
        a, b = values
        if node.op in ("maximum", "minimum"):
            return Number(max(a, b) if node.op == "maximum" else min(a, b), bits or 32)
        if node.op in ("floordiv", "cdiv"):  # as in C
            over = Number(a + b - 1, bits).value if node.op == "cdiv" else a
            quotient = abs(over) // abs(b)
            return Number(quotient if (over < 0) == (b < 0) else -quotient, bits)
        operation = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b}[node.op]
        return Number(operation(), bits)


@dataclass
class Kernel:
    """A loop whose steps choose a product by comparisons."""

    g: Graph = field(default_factory=Graph)
    inputs: dict[str, Node] = field(default_factory=dict)
    sides: dict[Node, bool] = field(default_factory=dict)  # of comparisons, with which answer of the flag

    def size(self, name: str) -> Node:
        node = self.g.intern("constexpr", (), {"name": name, "value": 16}, "int32", ())
        return self.inputs.setdefault(name, node)

    def number(self, name: str) -> Node:
        node = self.g.intern("param", (), {"name": name, "traced": 5}, "int32", ())
        return self.inputs.setdefault(name, node)

    def element(self, name: str) -> Node:
        """Of a table, in 64 bits."""
        return self.inputs.setdefault(name, self.g.fresh("load", {}, "int64", (), self.g.top))

    def pid(self) -> Node:
        return self.inputs.setdefault("pid", self.g.pid(0))

    def lanes(self, size: Node, axis: int) -> Node:
        return self.g.lane(size, axis, 2)

    def loop(self, lo: Node, hi: Node, step: Node, masks) -> For:
        """`masks` gives comparisons of a step."""
        g = self.g
        region = g.loop_region(lo, hi, step, "range", None)
        with g.at(region):
            every = masks(region.iv)
            mask = every[0]
            for one in every[1:]:
                mask = g.both(mask, one)
            tile = g.fresh("load", {}, "float32", mask.shape, region)
            product = g.make("dot", (tile, tile), {"precision": "ieee"}, "float32", mask.shape)
            phi = g.fresh("phi", {"name": "sum"}, "float32", mask.shape, region)
            carry = Carry(
                phi, g.zeros(mask.shape, "float32"), g.add(phi, g.where(mask, product, g.number(0.0)))
            )
        loop = For(region, g.here, [carry])
        self.effects = [TapeStore("t", g.const(0), loop_out(g, loop, 0), g.top)]
        return loop


def causal_rows(k: Kernel) -> tuple[For, list[Node]]:
    """A program of rows walks the columns up to its diagonal."""
    g, m, n, length, shift = k.g, k.size("M"), k.size("N"), k.number("length"), k.number("shift")
    start = g.mul(k.pid(), m)
    rows = g.add(g.add(start, k.lanes(m, 0)), shift)
    end = g.make("minimum", (g.add(start, m), length), {}, "int32", ())
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        cols = g.add(i, k.lanes(n, 1))
        asked.extend([g.compare("<", cols, length), g.compare("<=", cols, rows)])
        return asked

    return k.loop(g.const(0), end, n, masks), asked


def causal_columns(k: Kernel) -> tuple[For, list[Node]]:
    """An owner of columns walks the programs of rows from its diagonal on."""
    g, m, n, length = k.g, k.size("M"), k.size("N"), k.number("length")
    start = g.mul(k.pid(), n)
    cols = g.add(start, k.lanes(n, 1))
    asked: list[Node] = [g.compare("<", cols, length)]

    def masks(i: Node) -> list[Node]:
        rows = g.add(g.mul(i, m), k.lanes(m, 0))
        asked.extend([g.compare("<", rows, length), g.compare(">=", rows, cols)])
        return asked

    first = g.make("floordiv", (start, m), {}, "int32", ())
    return k.loop(first, k.number("count"), g.const(1), masks), asked


def window(k: Kernel) -> tuple[For, list[Node]]:
    """Columns that are so far behind the rows at most, from any first one on."""
    g, m, n = k.g, k.size("M"), k.size("N")
    rows = g.add(g.mul(k.pid(), m), k.lanes(m, 0))
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        cols = g.add(i, k.lanes(n, 1))
        behind = g.sub(rows, cols)
        asked.extend([g.compare("<", behind, k.number("shift")), g.compare(">=", behind, g.const(0))])
        asked.append(g.compare("<", cols, k.number("length")))
        return asked

    return k.loop(k.number("first"), k.number("length"), n, masks), asked


def table(k: Kernel) -> tuple[For, list[Node]]:
    """A sequence that data bounds, in 64 bits."""
    g, m, n, end = k.g, k.size("M"), k.size("N"), k.element("length")
    rows = g.add(g.add(k.element("first"), g.mul(k.pid(), m)), k.lanes(m, 0))
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        cols = g.add(i, k.lanes(n, 1))
        asked.extend([g.compare("<", cols, end), g.compare("<=", cols, rows)])
        return asked

    return k.loop(k.element("first"), end, n, masks), asked


def depth(k: Kernel) -> tuple[For, list[Node]]:
    """The last block of a product's depth, widened before it is compared."""
    g, n, length = k.g, k.size("N"), k.number("length")
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        left = g.sub(length, g.mul(i, n))
        asked.append(g.compare("<", k.lanes(n, 1), left))
        wide = g.add(g.cast(g.add(g.mul(i, n), k.lanes(n, 1)), "int64"), g.const(3))
        asked.append(g.compare("<", wide, length))
        return asked

    return k.loop(g.const(0), k.number("count"), g.const(1), masks), asked


def flagged(k: Kernel) -> tuple[For, list[Node]]:
    """Rows up to the diagonal with a flag, and columns from so far behind on without it."""
    g, m, n = k.g, k.size("M"), k.size("N")
    rows = g.add(g.mul(k.pid(), m), k.lanes(m, 0))
    flag = k.inputs["flag"] = g.intern("constexpr", (), {"name": "FLAG", "value": True}, "int1", ())
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        cols = g.add(i, k.lanes(n, 1))
        stmt = g.fork(flag, True)
        with g.at(stmt.then):
            asked.append(g.compare("<=", cols, rows))
        with g.at(stmt.other):
            asked.append(g.compare(">", cols, g.sub(rows, k.number("shift"))))
        k.sides = {asked[0]: True, asked[1]: False}
        return [g.merged(stmt, asked[0], asked[1], asked[0], g.here)]

    return k.loop(g.const(0), k.number("length"), n, masks), asked


def anywhere(k: Kernel) -> tuple[For, list[Node]]:
    """Rows that begin at any number."""
    g, m, n = k.g, k.size("M"), k.size("N")
    rows = g.add(k.number("first"), k.lanes(m, 0))
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        asked.append(g.compare("<=", g.add(i, k.lanes(n, 1)), rows))
        return asked

    return k.loop(g.const(0), k.number("length"), n, masks), asked


def two_starts(k: Kernel) -> tuple[For, list[Node]]:
    """Columns behind either of two rows, from any first one on."""
    g, m, n = k.g, k.size("M"), k.size("N")
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        cols = g.add(i, k.lanes(n, 1))
        asked.append(g.compare(">", cols, g.add(k.number("shift"), k.lanes(m, 0))))
        asked.append(g.compare(">=", cols, g.add(g.mul(k.pid(), m), k.lanes(m, 0))))
        return asked

    return k.loop(k.number("first"), k.number("length"), n, masks), asked


def below(k: Kernel) -> tuple[For, list[Node]]:
    """Columns up to some row, from any first one on."""
    g, m, n = k.g, k.size("M"), k.size("N")
    asked: list[Node] = []

    def masks(i: Node) -> list[Node]:
        asked.append(g.compare("<=", g.add(i, k.lanes(n, 1)), g.add(k.number("shift"), k.lanes(m, 0))))
        return asked

    return k.loop(k.number("first"), k.number("length"), n, masks), asked


LOOPS = {
    f.__name__: f
    for f in (causal_rows, causal_columns, window, table, depth, flagged, anywhere, two_starts, below)
}
SMALL = {
    "flag": (True, False),
    "pid": range(5),
    "length": range(-2, 40),
    "shift": range(-9, 30),
    "count": range(9),
    "first": range(-3, 12),
}
END = 2**31
FAR = [0, 1, 5, END - 1, END - 2, END - 16, END - 33, END // 2, -1, -END, -END + 7, -END // 2 + 3, 2**27 - 1]
WIDE = [*FAR, END, END + 5, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**63) + 9, -(2**40)]


def made(name: str) -> tuple[Kernel, For, list[Node]]:
    k = Kernel()
    loop, asked = LOOPS[name](k)
    (found,) = whole_steps.find(k.g, k.effects)
    assert set(found.answered) == set(asked)
    split_loops.split(SimpleNamespace(graph=k.g, args={}, tl="tl"), found)  # type: ignore[arg-type]
    return k, loop, asked


def count(steps: range) -> int:
    """Also of more than have a length."""
    return max(-((steps.start - steps.stop) // steps.step), 0)


def checked(k: Kernel, loop: For, asked: list[Node], values: dict[str, int], exact: bool) -> int:
    """How many steps are whole, after asking some of all their lanes; `exact`: no others could be."""
    sizes = ("M", "N")
    given = {
        k.inputs[name]: Number(value) if name in sizes else typed(value) for name, value in values.items()
    }
    for name in ("pid", "length", "first"):
        if name in k.inputs and k.inputs[name].op in ("pid", "load"):
            given[k.inputs[name]] = Number(values[name], 32 if name == "pid" else 64)
    machine = Machine(given)
    lo, hi, step = (machine.of(node).value for node in loop.region.bounds)
    bits = max(machine.of(node).bits or 32 for node in loop.region.bounds)
    asked = [one for one in asked if k.sides.get(one) in (None, values.get("flag"))]
    every, done, whole = range(lo, hi, step), 0, 0
    for start, end, masked in loop.split.parts:
        walked = range(machine.of(start).value, machine.of(end).value, step)
        if not walked:
            continue
        assert done < count(every) and walked[0] == every[done], (values, walked, every)
        places = {0, 1, count(walked) // 2, count(walked) - 2, count(walked) - 1}
        for at in sorted(range(count(walked)) if count(walked) < 60 else places):
            if 0 <= at < count(walked):
                step_of = Machine({**machine.given, loop.region.iv: Number(walked[at], bits)})
                inside = all(np.all(step_of.of(one).value) for one in asked)
                assert inside or masked, (values, walked[at])
                assert not (exact and inside and masked), (values, walked[at])
        done += count(walked)
        whole += 0 if masked else count(walked)
    assert done == count(every), (values, every)
    return whole


@pytest.mark.parametrize("name", LOOPS)
def test_steps_are_whole__exactly_where_all_lanes_are(name: str) -> None:
    k, loop, asked = made(name)
    chance, whole = random.Random(name), 0
    for _ in range(1500):
        values = {n: chance.choice(SMALL.get(n, (1, 2, 4, 8))) for n in k.inputs}
        whole += checked(k, loop, asked, values, exact=True)
    assert whole > 100


@pytest.mark.parametrize("name", LOOPS)
def test_numbers_at_the_ends_of_their_types__never_make_a_step_whole_that_is_not(name: str) -> None:
    k, loop, asked = made(name)
    chance, whole = random.Random(name), 0
    for _ in range(3000):
        values = {n: chance.choice((1, 16, 128)) if n in "MN" else chance.choice(WIDE) for n in k.inputs}
        values["flag"] = chance.choice((True, False))
        values["pid"] = chance.choice([n for n in FAR if n >= 0])
        if "count" in values:
            values["count"] = min(abs(values["count"]), END - 1)
        values = {n: v for n, v in values.items() if n in k.inputs}
        whole += checked(k, loop, asked, values, exact=False)
    assert whole


def test_numbers_far_from_each_other__do_not_wrap() -> None:
    k, loop, asked = made("below")
    values = {"M": 4, "N": 8, "first": -END, "length": -END + 100, "shift": END - 5}
    assert checked(k, loop, asked, values, exact=True) == 13


def test_of_loops_in_each_other__the_inner_one_is_split() -> None:
    k = Kernel()
    g, m, n, length = k.g, k.size("M"), k.size("N"), k.number("length")
    region = g.loop_region(g.const(0), length, m, "range", None)
    with g.at(region):
        rows = g.add(region.iv, k.lanes(m, 0))
        inner = k.loop(
            g.const(0),
            length,
            n,
            lambda i: [g.compare("<", rows, length), g.compare("<=", g.add(i, k.lanes(n, 1)), rows)],
        )
        out = loop_out(g, inner, 0)
        phi = g.fresh("phi", {"name": "sum"}, "float32", out.shape, region)
        chosen = g.where(g.compare("<", rows, length), out, g.number(0.0))
        after = g.add(phi, chosen)
    outer = For(region, g.top, [Carry(phi, g.zeros(out.shape, "float32"), after)])
    effects = [TapeStore("t", g.const(0), loop_out(g, outer, 0), g.top)]
    (found,) = whole_steps.find(g, effects)
    assert found.steps.loop is inner
    inner.order = "reverse"
    (found,) = whole_steps.find(g, effects)
    assert found.steps.loop is outer


def found_in(change=None, name: str = "causal_rows") -> list[whole_steps.Found]:
    """Of a loop that is changed."""
    k = Kernel()
    loop, _ = LOOPS[name](k)
    if change is not None:
        change(k, loop)
    return whole_steps.find(k.g, k.effects)


def backwards(k: Kernel, loop: For) -> None:
    loop.order = "reverse"


def taped(k: Kernel, loop: For) -> None:
    loop.tape = [TapeStore("t", k.g.const(0), loop.carries[0].phi, loop.region)]


def read_back(k: Kernel, loop: For) -> None:
    loop.provides = {loop.carries[0].phi: k.g.zeros(loop.carries[0].phi.shape, "float32")}


def until(k: Kernel, loop: For) -> None:
    loop.cond = k.g.const(True)


def unrolled(k: Kernel, loop: For) -> None:
    loop.region.call = "tl.static_range"


def by_any_number(k: Kernel, loop: For) -> None:
    lo, hi, _ = loop.region.bounds  # type: ignore[misc]
    loop.region.bounds = (lo, hi, k.number("stride"))


def from_a_carry(k: Kernel, loop: For) -> None:
    _, hi, step = loop.region.bounds  # type: ignore[misc]
    loop.region.bounds = (k.g.fresh("phi", {}, "int32", (), k.g.top), hi, step)


def without_products(k: Kernel, loop: For) -> None:
    loop.carries[0].next = loop.carries[0].phi


STAYS = (backwards, taped, read_back, until, unrolled, by_any_number, from_a_carry, without_products)


@pytest.mark.parametrize("change", STAYS)
def test_loop__stays(change) -> None:
    assert found_in() and not found_in(change)


def compared(*masks) -> list[whole_steps.Found]:
    """What is found where a step asks comparisons of its columns in the rows of a program."""
    k = Kernel()
    g, m, n = k.g, k.size("M"), k.size("N")
    rows = g.add(g.mul(k.pid(), m), k.lanes(m, 0))

    def every(i: Node) -> list[Node]:
        return [mask(k, rows, g.add(i, k.lanes(n, 1))) for mask in masks]

    k.loop(g.const(0), k.number("length"), n, every)
    return whole_steps.find(g, k.effects)


def inside(k: Kernel, rows: Node, cols: Node) -> Node:
    return k.g.compare("<", cols, k.number("length"))


def with_a_load(k: Kernel, rows: Node, cols: Node) -> Node:
    return k.g.compare("<", cols, k.g.fresh("load", {}, "int32", rows.shape, k.g.here))


def equal(k: Kernel, rows: Node, cols: Node) -> Node:
    return k.g.compare("==", cols, rows)


def same_in_all_programs(k: Kernel, rows: Node, cols: Node) -> Node:
    return k.g.compare("<", k.lanes(k.size("N"), 1), k.number("width"))


def in_a_branch(k: Kernel, rows: Node, cols: Node) -> Node:
    g = k.g
    stmt = g.fork(g.compare("<", k.number("width"), k.number("length")), False)
    with g.at(stmt.then):
        one = g.compare("<=", cols, rows)
    with g.at(stmt.other):
        other = g.compare("!=", cols, rows)
    return g.merged(stmt, one, other, one, g.here)


@pytest.mark.parametrize("mask", [with_a_load, equal, same_in_all_programs, in_a_branch])
def test_comparison__is_asked_in_all_steps(mask) -> None:
    assert not compared(mask)
    (found,) = compared(inside, mask)
    assert [one.attrs["cmp"] for one in found.answered] == ["<"] and len(found.conditions) == 1


def test_index_that_may_wrap__is_asked_whether_it_does() -> None:
    """Rows that begin anywhere may end behind the last number, those at multiples of their number do not."""

    def shifted(k: Kernel, rows: Node, cols: Node) -> Node:
        return k.g.compare("<=", cols, k.g.add(rows, k.number("shift")))

    def diagonal(k: Kernel, rows: Node, cols: Node) -> Node:
        return k.g.compare("<=", cols, rows)

    assert len(compared(shifted)[0].conditions) == 2
    assert len(compared(diagonal)[0].conditions) == 1


def test_mask_that_is_formed_outside_of_the_loop__is_formed_in_masked_steps() -> None:
    k = Kernel()
    g, m, n = k.g, k.size("M"), k.size("N")
    rows = g.add(g.mul(k.pid(), m), k.lanes(m, 0))
    there = g.both(g.compare("<", rows, k.number("length")), g.compare(">=", rows, k.number("first")))
    loop = k.loop(
        g.const(0),
        k.number("length"),
        n,
        lambda i: [there, g.compare("<", g.add(i, k.lanes(n, 1)), k.number("length"))],
    )
    (found,) = whole_steps.find(g, k.effects)
    assert len(found.answered) == 3 and there in nodes_in([loop])
    split_loops.split(SimpleNamespace(graph=g, args={}, tl="tl"), found)  # type: ignore[arg-type]
    used = set(nodes_in([loop.carries[0].next]))
    assert there not in used
    asked = [node for node in used if node.op == "select"]
    assert {node.args[1] for node in asked} == set(found.answered)
    assert all(node.args[0] is loop.split.flag and node.home is loop.region for node in asked)

"""When a gradient write may be a store: the proofs, and the run-time checks they rest on."""

from __future__ import annotations

import ast
import types

import pytest
import torch
from diff_support import ROOT, draft
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import For, GradWrite, Node
from kernel_agent.differentiate.ir.values import Arg
from kernel_agent.differentiate.prove.affine import Affine, upper
from kernel_agent.differentiate.prove.disjoint import Proof
from kernel_agent.differentiate.prove.disjoint import disjoint as proven_disjoint
from kernel_agent.differentiate.read.normalise import Builder
from kernel_agent.differentiate.schedule import programs
from kernel_agent.differentiate.write import helpers

HEAD = """
import triton.language as tl

def kernel(x_ptr, s_ptr, stride, n, m, B: tl.constexpr, HOP: tl.constexpr):
    pid = tl.program_id(0)
    lane = tl.arange(0, B)
"""


def addresses(body: str, hop: int = 8) -> tuple[Builder, list]:
    """The loads of a kernel whose body is given."""
    tree = ast.parse(HEAD + body)
    function = tree.body[1]
    assert isinstance(function, ast.FunctionDef)
    import triton.language as tl

    module = types.ModuleType("m")
    module.tl = tl  # type: ignore[attr-defined]
    args = {
        "x_ptr": Arg("x_ptr", "pointer", dtype="float32", active=True, storage=1),
        "s_ptr": Arg("s_ptr", "pointer", dtype="int32", storage=2),
        "stride": Arg("stride", "int", 64),
        "n": Arg("n", "int", 60),
        "m": Arg("m", "int", 7),
        "B": Arg("B", "constexpr", 16),
        "HOP": Arg("HOP", "constexpr", hop),
    }
    builder = Builder(function, module, {}, args)
    kernel = builder.kernel()
    loops = [item for item in kernel.effects if isinstance(item, For)]
    return builder, [
        (base, offset, mask, tuple(loops)) for base, offset, mask, _ in builder.loaded if base.active
    ]


def proof(body: str, axes: list[int]) -> object:
    builder, loads = addresses(body)
    _, offset, mask, loops = loads[-1]
    return proven_disjoint(builder.g, offset, mask, loops, axes)


PROVEN = {
    "flat": ("    x = tl.load(x_ptr + pid * B + lane)", [0]),
    "row": ("    x = tl.load(x_ptr + pid * stride + lane, mask=lane < n)", [0]),
    "tile": (
        "    r = pid * B + lane\n    x = tl.load(x_ptr + r[:, None] * stride + lane[None, :], "
        "mask=lane[None, :] < n)",
        [0],
    ),
    "quotient_and_remainder": (
        "    q = pid // m\n    r = pid % m\n    x = tl.load(x_ptr + q * stride * m + r * stride + lane, "
        "mask=lane < n)",
        [0],
    ),
    "loop": (
        "    for i in range(0, n, B):\n        x = tl.load(x_ptr + pid * stride + i + lane, mask=i + lane "
        "< n)",
        [0],
    ),
    "ragged_chunks": (
        "    part = tl.program_id(1)\n    end = tl.minimum(part * m + m, n)\n    for i in range(part * m, "
        "end, B):\n"
        "        x = tl.load(x_ptr + pid * n + i + lane, mask=i + lane < end)",
        [0, 1],
    ),
    "bounded_data": (
        "    i = tl.load(s_ptr + pid)\n    x = tl.load(x_ptr + pid * stride + i, mask=(i >= 0) & (i < n))",
        [0],
    ),
    "persistent": (
        "    for i in range(pid, m, tl.num_programs(0)):\n        x = tl.load(x_ptr + i * stride + lane, "
        "mask=lane < n)",
        [0],
    ),
    "block_of_quotients_and_remainders": (
        "    i = pid * B + lane\n    x = tl.load(x_ptr + i // m * stride + i % m, mask=i < n)",
        [0],
    ),
    "image_of_a_flat_block": (
        "    i = pid * B + lane\n    row = i // m\n    x = tl.load(x_ptr + (row // n * n * stride + row % n * stride "
        "+ i % m)[:, None] * B + lane[None, :], mask=(i < n)[:, None])",
        [0],
    ),
}  # fmt: skip
UNPROVEN = {
    "quotients_of_a_block": ("    i = pid * B + lane\n    x = tl.load(x_ptr + i // m * stride, mask=i < n)", [0]),
    "remainders_of_a_block": ("    i = pid * B + lane\n    x = tl.load(x_ptr + i % m, mask=i < n)", [0]),
    "by_different_divisors": ("    i = pid * B + lane\n    x = tl.load(x_ptr + i // m * stride + i % n, mask=i < n)", [0]),
    "of_different_lanes": ("    i = pid * B + lane\n    x = tl.load(x_ptr + (i // m)[:, None] * stride + (i % m)[None, :], mask=(i < n)[:, None])", [0]),
    "of_overlapping_blocks": ("    i = pid * HOP + lane\n    x = tl.load(x_ptr + i // m * stride + i % m, mask=i < n)", [0]),
    "of_a_block_for_all_rows": ("    i = pid * B + lane\n    x = tl.load(x_ptr + (i // m * stride + i % m)[:, None] + 0 * lane[None, :], mask=(i < n)[:, None])", [0]),
    "no_program": ("    x = tl.load(x_ptr + lane)", [0]),
    "second_axis": ("    x = tl.load(x_ptr + pid * B + lane)", [0, 1]),
    "overlapping_windows": ("    x = tl.load(x_ptr + pid * HOP + lane)", [0]),
    "quotient_only": ("    x = tl.load(x_ptr + pid // m * stride + lane, mask=lane < n)", [0]),
    "remainder_only": ("    x = tl.load(x_ptr + pid % m * stride + lane, mask=lane < n)", [0]),
    "data": ("    x = tl.load(x_ptr + tl.load(s_ptr + pid) * stride + lane, mask=lane < n)", [0]),
    "data_that_may_be_negative": ("    i = tl.load(s_ptr + pid)\n    x = tl.load(x_ptr + pid * stride + i, mask=i < n)", [0]),
    "remainder_of_data": ("    i = tl.load(s_ptr + pid)\n    x = tl.load(x_ptr + pid * stride + i % m, mask=pid < 99)", [0]),
    "remainder_of_data_in_a_tile": ("    x = tl.load(x_ptr + pid * B + tl.load(s_ptr + pid) % B)", [0]),
    "wrapped": ("    x = tl.load(x_ptr + (pid * B + lane) % n)", [0]),
    "halved": ("    x = tl.load(x_ptr + pid * B + lane // 2)", [0]),
    "loop_not_in_address": ("    for i in range(3):\n        x = tl.load(x_ptr + pid * B + lane + 0 * i)", [0]),
    "two_in_one_stride": ("    x = tl.load(x_ptr + (pid + tl.program_id(1)) * stride + lane, mask=lane < n)", [0, 1]),
    "scalar_for_a_block": ("    x = tl.load(x_ptr + pid + 0 * lane)", [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PROVEN))
def test_proven(name: str) -> None:
    body, axes = PROVEN[name]
    assert isinstance(proof(body, axes), Proof), proof(body, axes)


@pytest.mark.parametrize("name", sorted(UNPROVEN))
def test_unproven(name: str) -> None:
    body, axes = UNPROVEN[name]
    assert isinstance(proof(body, axes), str)


def layouts(body: str, axes: list[int]) -> list[list[str]]:
    found = proof(body, axes)
    assert isinstance(found, Proof), found
    return [[_text(part) for pair in layout for part in pair] for layout in found.layouts]


def _text(node: Node | None) -> str:
    """A value of a layout: parameters by name, operations in front of what they take."""
    if node is None:
        return "None"
    name = str(node.attrs.get("name", node.value if node.op == "const" else node.op))
    return f"{name}({', '.join(map(_text, node.args))})" if node.args else name


def test_layouts__a_bound_on_a_sum_makes_one_dimension_of_it() -> None:
    """Chunks may reach beyond the row, but what the mask lets through does not."""
    body, axes = PROVEN["ragged_chunks"]
    assert layouts(body, axes) == [["n", "npid", "1", "n"], ["m", "npid", "1", "m"]]


def test_layouts__chunks_that_only_the_loop_ends_keep_their_reach() -> None:
    """The mask lets the last block of a chunk run into the next one: the host has to be asked whether a chunk
    is whole blocks."""
    body = PROVEN["ragged_chunks"][0].replace("< end)", "< n)")
    inner = next(layout for layout in layouts(body, [0, 1]) if layout[0] == "m")
    assert inner[1:] == ["npid", "1", "mul(B, cdiv(m, B))"]


def test_layouts__a_minimum_less_a_loop_variable_bounds_by_each_side() -> None:
    """A block may be longer than a chunk; the mask lets no lane beyond it."""
    body = """
    limit = tl.minimum(m, n - pid * m)
    for k in range(0, limit, B):
        x = tl.load(x_ptr + pid * stride + k + lane, mask=lane < limit - k)
"""
    assert layouts(body, [0]) == [["stride", "npid", "1", "m"]]


def test_layouts__a_mask_with_fewer_axes_bounds_the_last_ones() -> None:
    body = "    x = tl.load(x_ptr + pid * stride + lane[:, None] * B + lane[None, :], mask={})"
    whole, short = (layouts(body.format(mask), [0]) for mask in ("lane[None, :] < m", "lane < m"))
    assert whole == short


def layout_checker():  # type: ignore[no-untyped-def]
    space: dict = {"torch": torch}
    exec(helpers.DISJOINT, space)  # noqa: S102
    return space["disjoint"]


@pytest.mark.parametrize(
    ("dims", "fine"),
    [
        (((64, 10), (1, 60)), True),
        (((1, 60), (64, 10)), True),
        (((1, 60), (60, 10)), True),
        (((1, 61), (60, 10)), False),
        (((0, 10), (1, 60)), False),
        (((0, 1), (1, 60)), True),
        (((64, None), (1, 60)), True),
        (((64, None), (128, 2), (1, 60)), False),
        (((1, 10), (10, 64)), True),
    ],
)
def test_layout_check__accepts_exactly_what_does_not_overlap(dims: tuple, fine: bool) -> None:
    disjoint = layout_checker()
    if fine:
        disjoint(*dims)
    else:
        with pytest.raises(ValueError, match="overlaps"):
            disjoint(*dims)


def test_tiles__grouped_program_ids_are_a_bijection() -> None:
    """What owner kernels rely on: the recognised formula maps program ids one to one onto tiles, for ragged
    groups too."""
    for rows in (1, 3, 8, 9):
        for cols in (1, 2, 5):
            for group in (1, 4, 8):
                seen = set()
                for pid in range(rows * cols):
                    first = pid // (group * cols) * group
                    height = min(rows - first, group)
                    seen.add((first + pid % (group * cols) % height, pid % (group * cols) // height))
                assert seen == {(r, c) for r in range(rows) for c in range(cols)}


GROUPED = """
    per_group = HOP * n
    first = pid // per_group * HOP
    height = tl.minimum(m - first, HOP)
    r = first + pid % per_group % height
    c = pid % per_group // height
    x = tl.load(x_ptr + (r * B + lane[:, None]) * stride + c * B + lane[None, :]{more})"""


def variables(body: str) -> tuple[programs.Programs, Node]:
    """The program variables that a kernel with one gradient write would have, and that write's address."""
    builder, loads = addresses(body)
    base, offset, mask, _ = loads[-1]
    write = GradWrite(base, offset, mask, offset, builder.g.top, 1)
    kernel = types.SimpleNamespace(graph=builder.g)
    return programs.program_variables(kernel, [write], [0]), offset  # type: ignore[arg-type]


def test_tiles__other_uses_of_a_swizzled_id_are_noticed() -> None:
    found, _ = variables(GROUPED.format(more=""))
    assert [v.hint for v in found.virtual] == ["r", "c"]
    found, _ = variables(GROUPED.format(more=" + pid"))
    assert len(found.virtual) == 1


def test_digits__an_id_is_split_as_the_kernel_splits_it() -> None:
    found, _ = variables(
        "    r = pid // m\n    c = pid % m\n    x = tl.load(x_ptr + r * stride + c // HOP + pid)"
    )
    assert [v.hint for v in found.virtual] == ["r", "c_high", "c_low"]
    assert len(found.divisible) == 2  # the host has to find the counts divisible
    pid = next(node for node in found.table if node.op == "pid")
    assert found.of(pid) == set(found.virtual)


def test_digits__two_ways_of_splitting_are_none() -> None:
    found, _ = variables("    x = tl.load(x_ptr + pid // m * stride + pid % m + pid // n + pid % n)")
    assert len(found.virtual) == 1


def test_upper__bounds_programs_and_minima() -> None:
    g = Graph()
    pid = g.intern("pid", (), {"axis": 0}, "int32", ())
    n = g.intern("param", (), {"name": "n", "traced": 60}, "int32", ())
    unknown = g.fresh("load", {}, "int32", (), g.top)
    assert Affine(g).uniform(upper(g, g.mul(g.add(pid, g.one), n)))  # type: ignore[arg-type]
    assert upper(g, g.make("minimum", (unknown, n))) is n
    assert upper(g, g.make("maximum", (unknown, n))) is None


def test_matmul__owns_both_operands_without_atomics() -> None:
    report = draft(ROOT / "examples/matmul.py", {"M": 70, "N": 50, "K": 45, "leaky": True})["report"]
    assert (report["atomics"], report["atomics_naive"]) == (0, 2)
    assert {line["class"] for line in report["lines"]} >= {"B", "owner", "spill"}


def _nodes(root: Node) -> list[Node]:
    from kernel_agent.differentiate.ir.nodes import reachable

    return [n for n in reachable([root]) if isinstance(n, Node)]

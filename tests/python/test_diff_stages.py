"""Online softmax in stages that a flag chooses: sums that begin with a number, maxima merged from loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent.differentiate.ir.graph import Graph
from kernel_agent.differentiate.ir.nodes import Node
from kernel_agent.differentiate.read.settled import settled

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 21, "stage": 3}]


@triton.jit
def inner(x_ptr, w_ptr, row, m, l, acc, low, high, N, BLOCK: tl.constexpr, SQUARE: tl.constexpr):
    for start in range(low, high, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < high
        x = tl.load(x_ptr + row * N + cols, mask=mask, other=-1.0e30)
        w = tl.load(w_ptr + cols, mask=mask, other=0.0)
        if SQUARE:
            x = tl.where(mask, x * x, -1.0e30)
        m_new = tl.maximum(m, tl.max(x, 0))
        p = tl.exp(x - m_new)
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * w, 0)
        m = m_new
    return m, l, acc


@triton.jit
def kernel(x_ptr, w_ptr, y_ptr, N, HALF, BLOCK: tl.constexpr, STAGE: tl.constexpr):
    row = tl.program_id(0)
    m, l, acc = START
    if STAGE & 1:
        m, l, acc = inner(x_ptr, w_ptr, row, m, l, acc, 0, HALF, N, BLOCK, False)
    if STAGE & 2:
        BETWEEN
        m, l, acc = inner(x_ptr, w_ptr, row, m, l, acc, HALF, N, N, BLOCK, True)
    tl.store(y_ptr + row, acc / l)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w, stage=3):
    x = x.contiguous()
    y = torch.empty(x.shape[0], device=x.device, dtype=x.dtype)
    kernel[(x.shape[0],)](x, w, y, x.shape[1], x.shape[1] // 2, BLOCK=8, STAGE=stage)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return (x, torch.randn(dims["N"], device=device, dtype=dtype)), {"stage": dims["stage"]}
"""
DIMS = [{"M": 3, "N": n, "stage": stage} for n in (21, 40) for stage in (3, 1, 2)]
STARTS = {  # the maximum, the sum and what is summed to begin with; what happens between; telescoped?
    "one": ('float("-inf"), 1.0, 0.0', "pass", True),
    "nothing": ('float("-inf"), 0.0, 0.0', "pass", True),
    "finite": ("-4.0, 1.0, 0.5", "pass", None),
    "an_input": ("tl.load(w_ptr), 1.0, tl.load(w_ptr + 1)", "pass", None),
    "a_sum_that_is_an_input": ('float("-inf"), tl.exp(tl.load(w_ptr)), 0.0', "pass", None),
    "another_sum": ('float("-inf"), 1.0, 0.0', "l = 1.0", None),
}


@pytest.mark.parametrize("stage", [3, 1])
@pytest.mark.parametrize("name", sorted(STARTS))
def test_sums_of_an_online_softmax__whatever_they_begin_with(
    name: str, stage: int, write: Callable[[str], Path]
) -> None:
    start, between, telescoped = STARTS[name]
    file = write(SOURCE.replace("START", start).replace("BETWEEN", between))
    result = draft(file, {"M": 3, "N": 21, "stage": stage})
    if telescoped is not None:
        assert (result["report"]["tape_bytes"] == 0) == telescoped
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


def asked(cond: Callable[[Graph, Node], Node], around: Callable[[Graph, Node], Node], answer: bool) -> object:
    """What is known of a condition on STAGE in a branch of another."""
    g = Graph()
    stage = g.intern("constexpr", (), {"name": "STAGE", "value": 3}, "int32", ())
    stmt = g.fork(around(g, stage), True)
    with g.at(stmt.then if answer else stmt.other):
        return settled(g, cond(g, stage))


def equals(number: int, minuend: int | None = None) -> Callable[[Graph, Node], Node]:
    """STAGE == number, or minuend - STAGE == number."""

    def made(g: Graph, stage: Node) -> Node:
        return g.compare("==", stage if minuend is None else g.sub(g.const(minuend), stage), g.const(number))

    return made


def bit(number: int) -> Callable[[Graph, Node], Node]:
    return lambda g, stage: g.make("and", (stage, g.const(number)))


@pytest.mark.parametrize(
    ("cond", "around", "answer", "known"),
    [
        (equals(2), bit(1), True, False),
        (equals(2, 4), bit(1), True, False),
        (equals(1, 4), bit(1), True, None),
        (equals(2), bit(2), True, None),
        (equals(2), bit(2), False, False),
        (bit(1), equals(2), True, False),
        (bit(1), equals(3), True, True),
        (bit(1), equals(3), False, None),
        (bit(1), bit(1), False, False),
        (equals(3), equals(3, 6), True, True),
        (lambda g, stage: g.compare("==", g.mul(stage, stage), g.const(4)), bit(1), True, None),
    ],
)
def test_condition__has_an_answer_where_those_around_leave_one(
    cond: Callable, around: Callable, answer: bool, known: bool | None
) -> None:
    assert asked(cond, around, answer) is known

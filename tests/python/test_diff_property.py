"""A few of the random kernels and wrappers of tests/property (make property runs many), what kernels once
found, and that they find what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft
from kernel_agent.differentiate.reverse import derivatives

sys.path.insert(0, str(ROOT / "tests/property"))

import generate
import judge
import sequences
import wrappers
from shrink import shrink

CHUNK = 8  # programs a test


@pytest.mark.parametrize("first", range(0, 40, CHUNK))
def test_random_programs__have_no_wrong_gradient(first: int) -> None:
    right = 0
    for seed in range(first, first + CHUNK):
        program = generate.make(seed)
        outcome = judge.judge(program.source, program.sweep, seed)
        assert not outcome.bad, f"{outcome.reason}\n{program.source}\n{outcome.backward}"
        right += outcome.state == "right"
    assert right >= CHUNK // 2


@pytest.mark.parametrize("first", range(0, 24, CHUNK))
def test_random_wrappers__have_no_wrong_gradient(first: int) -> None:
    fine = 0
    for seed in range(first, first + CHUNK):
        program = wrappers.make(seed)
        outcome = judge.judge(program.source, program.sweep, seed, others=seed % 3 != 0)
        assert not outcome.bad, f"{outcome.reason}\n{program.source}\n{outcome.backward}"
        fine += outcome.state in ("right", "raised")
    assert fine >= CHUNK // 2


def test_random_kernels_over_packed_sequences__have_no_wrong_gradient() -> None:
    right = 0
    for seed in range(CHUNK):
        program = sequences.make(seed)
        outcome = judge.judge(program.source, program.sweep, seed, others=seed % 3 != 0)
        assert not outcome.bad, f"{outcome.reason}\n{program.source}\n{outcome.backward}"
        right += outcome.state == "right"
    assert right >= CHUNK // 2


def test_wrappers_size_that_was_not_traced__is_raised_or_right() -> None:
    """What the first size does not launch: right where the others are traced too, else raised by name."""
    program = next(p for p in map(wrappers.make, range(60)) if "branch" in p.features and _raises(p))
    assert judge.judge(program.source, program.sweep, program.seed, others=True).state == "right"


def _raises(program: generate.Program) -> bool:
    outcome = judge.judge(program.source, program.sweep, program.seed)
    return outcome.state == "raised" and judge.UNTRACED in outcome.reason


def test_wrong_rule__is_found_and_the_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(derivatives.UNARY, "sin", lambda g, x, y, d: g.mul(d, g.call("sin", x)))
    made = map(generate.make, range(100))
    program = next(
        p
        for p in made
        if "tl.sin(x)" in p.source and "rows" in p.features and not any("in place" in f for f in p.features)
    )
    found = judge.judge(program.source, program.sweep, program.seed)
    assert found.state == "wrong", found.reason

    def fails(source: str) -> bool:
        outcome = judge.judge(source, program.sweep, program.seed)
        return (outcome.state, outcome.kind) == ("wrong", found.kind)

    small = shrink(program.source, fails, most=25)
    assert "tl.sin" in small
    assert len(small) < len(program.source)


HEAD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 3, "N": 13}, {"M": 5, "N": 16}]


def make_args(dims, device="cuda", dtype=torch.float32):
    shapes = ((dims["N"], dims["M"]), (dims["N"],))
    x, y = (torch.randn(s, device=device, dtype=dtype) for s in shapes)
    return x.t(), y

"""
STUB = """

@autodiff(inputs_require_grad=(0, 1))
def stub(x, y):
    m, n = x.shape
    out = torch.empty((m, n), device=x.device, dtype=x.dtype)
    kernel[(GRID,)](x, y, out, m, n, x.stride(0), x.stride(1), N=16)
    return out
"""
SIGNATURE = (
    "\n@triton.jit\ndef kernel(x_ptr, y_ptr, out_ptr, m, n, rows, columns, N: tl.constexpr):\n    cols = "
    "tl.arange(0, N)\n"
)

# What the random programs found: once a wrong gradient, a refusal at run time, or a crash.
FOUND = {
    "two_addresses_of_one_gradient": (
        "m",
        """
    row = tl.program_id(0)
    y = tl.load(y_ptr + cols, mask=cols < n, other=0.0)
    y = y * tl.load(y_ptr + n - 1 - cols, mask=cols < n, other=0.0)
    x = tl.load(x_ptr + row * rows + cols * columns, mask=cols < n, other=0.0)
    tl.store(out_ptr + row * n + cols, x * y, mask=cols < n)
""",
    ),
    "programs_that_walk_the_rows_of_a_transposed_input": (
        "2",
        """
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        x = tl.load(x_ptr + row * rows + cols * columns, mask=cols < n, other=0.0)
        y = tl.load(y_ptr + cols, mask=cols < n, other=0.0)
        tl.store(out_ptr + row * n + cols, x * x * y, mask=cols < n)
""",
    ),
    "online_softmax_of_what_an_outer_loop_carries": (
        "m",
        """
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * rows + cols * columns, mask=cols < n, other=0.0)
    c = x
    for i in range(m):
        top = x * 0.0 - float("inf")
        total = x * 0.0
        mean = x * 0.0
        for j in range(3):
            y = tl.load(y_ptr + (cols + j) % n)
            new = tl.maximum(top, y)
            scale = tl.exp(top - new)
            p = tl.exp(y - new)
            total = total * scale + p
            mean = mean * scale + p * (c + y)
            top = new
        c = mean / total * 0.7
    tl.store(out_ptr + row * n + cols, c, mask=cols < n)
""",
    ),
}


@pytest.mark.parametrize("name", sorted(FOUND))
def test_found__stays_mended(name: str, tmp_path: Path) -> None:
    grid, body = FOUND[name]
    file = tmp_path / f"{name}.py"
    file.write_text(HEAD + SIGNATURE + body.lstrip("\n") + STUB.replace("GRID", grid))
    shapes = [{"M": 3, "N": 13}, {"M": 5, "N": 16}]
    assert_right(file, draft(file, shapes[0]), [(dims, "normal") for dims in shapes])


def test_step_function_of_a_softmax_of_several_steps__passes_no_gradient() -> None:
    """A value that is rebuilt around a running maximum stays without a gradient if it had none."""
    program = generate.make(100068)
    assert "tl.floor" in program.source
    outcome = judge.judge(program.source, program.sweep, program.seed)
    assert outcome.state == "right", outcome.reason

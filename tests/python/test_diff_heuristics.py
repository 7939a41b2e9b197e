"""What heuristics compute, the backward computes too: by a rule's text, or by the rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

FORWARD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"M": 5, "N": 20}}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


def rows(given):
    return 1 if given["N"] > 24 else 2


def size(given):
    return triton.next_power_of_2(given["N"])


def of_size(given):
    return size(given)


{decorators}
def norm_kernel(x_ptr, y_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    at = row[:, None] * N + cols[None, :]
    mask = (row[:, None] < M) & (cols[None, :] < N)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, x / tl.sqrt(tl.sum(x * x, axis=1) + 1.0)[:, None], mask=mask)


{after}


@autodiff(inputs_require_grad=(0,))
def norm(x):
    x = x.contiguous()
    M, N = x.shape
    y = torch.empty_like(x)
    norm_kernel[{grid}](x, y, M, N)
    return y
"""
DECORATED = "@triton.heuristics({{{}}})\n@triton.jit"
META = 'lambda meta: (triton.cdiv(M, meta["ROWS"]),)'
SHAPES = [({"M": m, "N": n}, "normal") for m, n in ((5, 20), (3, 33), (2, 1))]


def written(write: Callable[[str], Path], decorators: str, after: str = "", grid: str = META) -> Path:
    return write(FORWARD.format(decorators=decorators, after=after, grid=grid))


@pytest.mark.parametrize(
    ("decorators", "after", "lines"),
    [
        (
            DECORATED.format('"ROWS": rows, "BLOCK": lambda given: triton.next_power_of_2(given["N"])'),
            "",
            ["ROWS = rows(dict(N=N))", "BLOCK = triton.next_power_of_2(N)"],
        ),
        (
            DECORATED.format('"ROWS": rows, "BLOCK": of_size'),
            "",
            [
                "ROWS = rows(dict(N=N))",
                "BLOCK = of_size(dict(x_ptr=x_ptr, y_ptr=y_ptr, M=M, N=N, ROWS=rows(dict(N=N))))",
            ],
        ),
        (
            "@triton.jit",
            'norm_kernel = triton.heuristics({"ROWS": rows, "BLOCK": size})(norm_kernel)',
            [
                'ROWS = norm_kernel.values["ROWS"](dict(N=N))',
                'BLOCK = norm_kernel.values["BLOCK"](dict(N=N))',
            ],
        ),
        (
            '@triton.autotune([triton.Config({}, num_warps=w) for w in (1, 2)], key=["N"])\n'
            + DECORATED.format('**{"ROWS": rows}, "BLOCK": size'),
            "",
            ['ROWS = norm_kernel.fn.values["ROWS"](dict(N=N))', "BLOCK = size(dict(N=N))"],
        ),
    ],
)
def test_rule__is_what_the_backward_and_its_grid_go_by(
    decorators: str, after: str, lines: list[str], write: Callable[[str], Path]
) -> None:
    file = written(write, decorators, after)
    result = draft(file, {"M": 5, "N": 20})
    text = result["backward"]
    assert all(f"        {line}\n" in text for line in lines), text
    assert "ROWS=ROWS" in text.split("grid = grid(")[1].split("\n")[0]
    assert_right(file, result, SHAPES)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ('lambda given: 32 // given["ROWS"]', "BLOCK = 32 // rows(dict(N=N))"),
        ("of_rows", "BLOCK = of_rows(dict(ROWS=rows(dict(N=N))))"),
    ],
)
def test_rule_that_reads_what_an_earlier_one_computed__reads_it_in_the_backward_too(
    rule: str, line: str, write: Callable[[str], Path]
) -> None:
    """Triton passes a rule what those before it computed."""
    decorators = DECORATED.format(f'"ROWS": rows, "BLOCK": {rule}')
    file = written(write, "def of_rows(given):\n    return 32 // given['ROWS']\n\n\n" + decorators)
    result = draft(file, {"M": 5, "N": 16})
    assert f"        {line}\n" in result["backward"], result["backward"]
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 16), (3, 26), (2, 1))])

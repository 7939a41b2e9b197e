"""Gradients that need no zeros first: only where the kernels write every element. Fresh memory is NaN in
these tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import ROOT, assert_right, draft

SOURCE = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"M": 5, "N": 21}}]


@triton.jit
def kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
{body}


@autodiff(inputs_require_grad=(0,))
def stub(x):
    M, N = x.shape
    y = torch.zeros_like(x)
    kernel[({grid},)](x, y, M, N, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""
COLS = "    cols = tl.arange(0, BLOCK)\n"
TAIL = (
    "    x = tl.load(x_ptr + row * N + cols, mask={mask}, other=0.0)\n    tl.store(y_ptr + row * N + cols, "
    "x * x, mask={mask})"
)
LOOP = (
    "    for start in range(0, N, BLOCK):\n        cols = start + tl.arange(0, BLOCK)\n"
    "        x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)\n"
    "        tl.store(y_ptr + row * N + cols, x * x, mask=cols < N)"
)
CASES = {  # body, grid, whether the count says that all of (5, 21) is written
    "whole_rows": (LOOP, "M", True),
    "one_block_of_a_row": (COLS + TAIL.format(mask="cols < N"), "M", False),
    "some_rows": (LOOP, "M - 2", False),
    "some_columns": (LOOP.replace("cols < N", "cols < N - 3"), "M", False),
    "every_other": (LOOP.replace("range(0, N, BLOCK)", "range(0, N // 2, BLOCK)"), "M", False),
    "a_second_condition": (LOOP.replace("cols < N", "(cols < N) & (cols > 2)"), "M", None),
    "under_a_branch": ("    if row > 1:\n" + "\n".join("    " + line for line in LOOP.splitlines()), "M", True),
    "starts_later": (LOOP.replace("range(0, N", "range(5, N"), "M", None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_zeros__are_left_out_only_where_all_is_written(name: str, tmp_path: Path) -> None:
    body, grid, whole = CASES[name]
    file = tmp_path / f"{name}.py"
    file.write_text(SOURCE.format(body=body, grid=grid))
    result = draft(file, {"M": 5, "N": 21})
    call = next(line for line in result["backward"].splitlines() if "= gradient_of(x_ptr" in line)
    assert ("written=" in call) == (whole is not None), call
    if whole is not None:
        text = call.split("written=")[1].rstrip()[:-1]
        row = "BLOCK = triton.next_power_of_2(N)" in result["backward"]
        space = {"grid": (5 if grid == "M" else 3,), "N": 21, "BLOCK": 32 if row else 16, "min": min}
        assert (eval(text, {**space, "triton": __import__("triton")}) == 105) == whole
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((5, 21), (3, 16), (4, 7))])


def test_owner_and_main_kernel__write_all_of_a_matmul(tmp_path: Path) -> None:
    text = draft(ROOT / "examples/matmul.py", {"M": 70, "N": 50, "K": 45, "leaky": True})["backward"]
    assert "d_a_ptr = gradient_of(a_ptr, written=M * K)" in text
    assert "d_b_ptr = gradient_of(b_ptr, written=K * N)" in text


def test_private_rows__are_written_whole_or_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of parameters that every program stores need no zeros; a bias that a flag leaves out does."""
    text = draft(ROOT / "examples/layer_norm.py", {"M": 5, "N": 45})["backward"]
    for name in "wb":
        assert (
            f"d_{name}_ptr = gradient_of({name}_ptr, accumulate=True, copies=programs, written=min(" in text
        )
    monkeypatch.syspath_prepend(str(ROOT / "tests/published"))
    text = draft(ROOT / "tests/published/dyt.py", {"B": 2, "T": 4, "N": 70, "beta": True})["backward"]
    assert re.search(r"written=min\(N, BLOCK_N \* grid\[0\]\) if HAVE_BETA else 0", text)


def test_rows_that_a_branch_skips__are_zeroed_in_the_other() -> None:
    """Fresh memory is NaN here: every element has to be stored by one branch or the other."""
    file = ROOT / "examples/cross_entropy.py"
    result = draft(file, {"M": 9, "V": 45})
    assert "d_logits_ptr = gradient_of(logits_ptr, written=grid[0] * V)" in result["backward"]
    assert len(re.findall(r"tl\.store\(\s*d_logits_ptr", result["backward"])) == 2
    assert_right(file, result, [({"M": m, "V": v}, "normal") for m, v in ((9, 45), (8, 64), (1, 1))])

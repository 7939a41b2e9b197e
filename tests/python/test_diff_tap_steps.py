"""Windows with a stride: an owner walks the taps that reach its element, and divides once for all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diff_support import assert_right, draft, edits_of

POOL = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def pool_kernel(x_ptr, w_ptr, y_ptr, n_out, Y, X, OY, OX, k, stride, pad, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plane = o // (OY * OX)
    y0 = o // OX % OY * stride - pad
    x0 = o % OX * stride - pad
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(k):
        for j in range(k):
            y, x = y0 + i, x0 + j
            mask = (o < n_out) & (y >= 0) & (y < Y) & (x >= 0) & (x < X)
            weight = 1.0
            acc += weight * tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + o, acc, mask=o < n_out)


@autodiff(inputs_require_grad=(0,))
def pool(x, w, k, stride):
    N, Y, X = x.shape
    pad = k // 2
    OY, OX = (Y + 2 * pad - k) // stride + 1, (X + 2 * pad - k) // stride + 1
    y = torch.empty((N, OY, OX), device=x.device, dtype=x.dtype)
    pool_kernel[(triton.cdiv(y.numel(), 32),)](x, w, y, y.numel(), Y, X, OY, OX, k, stride, pad, BLOCK=32)
    return y


SWEEP = [{"N": 3, "Y": 9, "X": 12, "k": 3, "s": 2}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], dims["Y"], dims["X"], device=device, dtype=dtype)
    return x, torch.randn(dims["k"], dims["k"], device=device, dtype=dtype), dims["k"], dims["s"]
"""
DIMS = {"N": 3, "Y": 9, "X": 12, "k": 3, "s": 2}
SIZES = [
    DIMS,
    {"N": 2, "Y": 11, "X": 7, "k": 5, "s": 2},
    {"N": 1, "Y": 8, "X": 13, "k": 2, "s": 3},
    {"N": 2, "Y": 6, "X": 5, "k": 3, "s": 1},
    {"N": 1, "Y": 10, "X": 10, "k": 1, "s": 4},
    {"N": 2, "Y": 12, "X": 9, "k": 4, "s": 4},
]
CASES = [(dims, "normal") for dims in SIZES]
WEIGHT = "weight = 1.0"


@pytest.fixture
def changed(tmp_path: Path):
    return edits_of(POOL, tmp_path / "pool.py")


STEPPED = {
    "a sum": (WEIGHT, WEIGHT),
    "weights by the number of the tap": (WEIGHT, "weight = 0.5 * i - 0.3 * j + 1.0"),
    "some taps": (WEIGHT, "weight = tl.where((i + 2 * j) % 3 == 1, 2.0, 0.5)"),
    "the position beside the tap": (WEIGHT, "weight = (y0 + i) * 0.25 + j"),
    "64 bits": ("tl.program_id(0) *", "tl.program_id(0).to(tl.int64) *"),
}


@pytest.mark.parametrize("edit", STEPPED.values(), ids=STEPPED)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_taps_that_fit_a_stride__are_walked_alone(changed, edit: tuple[str, str], dtype: str) -> None:
    file = changed(edit)
    result = draft(file, DIMS, dtype=dtype)
    text = result["backward"]
    assert "for nth_i in range(tl.cdiv(k, stride)):" in text and "tl.atomic_add" not in text
    loop = text.partition("for nth_i")[2].partition("# write gradients")[0]
    assert "// stride" not in loop and "% stride" not in loop
    assert_right(file, result, CASES, 1e-5 if dtype == "float32" else 2e-3, dtype)


WHOLE = {
    "a weight of each tap": (WEIGHT, "weight = tl.load(w_ptr + i * k + j)"),
    "taps further apart": ("x0 + j", "x0 + 2 * j"),
}


@pytest.mark.parametrize("edit", WHOLE.values(), ids=WHOLE)
def test_taps_that_a_block_shares__are_walked_one_by_one(changed, edit: tuple[str, str]) -> None:
    file = changed(edit)
    result = draft(file, DIMS)
    assert "for j in range(k):" in result["backward"]
    assert_right(file, result, CASES)


MAXIMUM = (
    ("    acc = ", "    winner = tl.full([BLOCK], -1, dtype=tl.int32)\n    acc = "),
    ("tl.zeros([BLOCK], dtype=tl.float32)", 'tl.full([BLOCK], -float("inf"), dtype=tl.float32)'),
    (WEIGHT, "take = mask"),
    (
        "acc += weight * tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=0.0).to(tl.float32)",
        'v = tl.load(x_ptr + (plane * Y + y) * X + x, mask=mask, other=-float("inf")).to(tl.float32)\n'
        "            wins = take & ((v > acc) | (winner < 0))\n"
        "            acc = tl.where(wins, v, acc)\n"
        "            winner = tl.where(wins, i * k + j, winner)",
    ),
)


def test_a_maximum__asks_the_windows_that_reach_it(changed) -> None:
    file = changed(*MAXIMUM)
    result = draft(file, DIMS)
    assert "for nth_j in range(tl.cdiv(k, stride)):" in result["backward"]
    assert " // BLOCK" not in result["backward"].partition("pool_kernel_bwd_x(")[2].partition("# write")[0]
    assert_right(file, result, CASES)


def test_the_number_of_the_tap_that_won__may_be_saved_by_the_forward(changed) -> None:
    file = changed(*MAXIMUM)
    assert {"saved": 1} in draft(file, DIMS)["report"]["configs"]
    result = draft(file, DIMS, config={"saved": 1})
    assert "tl.load(saved_winner + " in result["backward"] and "spill_winner" not in result["backward"]
    assert result["backward"].count("wins =") == 1  # in the copy of the forward
    assert_right(file, result, CASES)


def test_windows_that_own_each_element__need_no_zeros(changed) -> None:
    file = changed((WEIGHT, WEIGHT))
    result = draft(file, DIMS)
    assert re.search(r"gradient_of\(\s*x_ptr, written=", result["backward"])
    assert_right(file, result, CASES)


@pytest.mark.parametrize("dims", [SIZES[2], SIZES[5]])
def test_windows_that_do_not_overlap_in_the_traced_call__are_windows_all_the_same(dims, changed) -> None:
    """Those of another size do; and what a block writes of them lies apart, no lane beside the next."""
    file = changed()
    result = draft(file, dims)
    assert result["report"]["atomics"] == 0, result["backward"]
    assert_right(file, result, CASES)


def test_a_mask_that_nobody_understands__may_be_what_keeps_planes_within_the_tensor(changed) -> None:
    """Of programs with more lanes than elements: an owner of all that they could reach would write behind
    the last plane."""
    edits = (
        ("k, stride, pad, BLOCK: tl", "k, stride, pad, odd, BLOCK: tl"),
        ("k, stride, pad, BLOCK=32", "k, stride, pad, 1, BLOCK=32"),
        ("mask = (o < n_out) & (y", "mask = (o * odd < n_out) & (y"),
    )
    file = changed(*edits)
    report = (result := draft(file, DIMS))["report"]
    why = "its mask does not say from where to where its window lies"
    assert report["atomics"] == 1 and any(why in line["reason"] for line in report["lines"])
    assert_right(file, result, CASES)

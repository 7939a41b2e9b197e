"""Stores that one step of a loop alone makes, and loops of a few steps that each do something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from diff_support import errors as found
from kernel_agent import errors

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 40, "K": 50}]


@triton.jit
def product_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    inside = (rm[:, None] < M) & (rn[None, :] < N)
    steps = tl.cdiv(K, BK)
    for LOOP:
        k = START + rk
        x = tl.load(a + rm[:, None] * K + k[None, :], mask=(rm[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(b + k[:, None] * N + rn[None, :], mask=(k[:, None] < K) & (rn[None, :] < N), other=0.0)
        acc += tl.dot(x, w)
        if TEST:
            tl.store(c + rm[:, None] * N + rn[None, :], acc * VALUE, mask=inside)
        # what follows


@autodiff(inputs_require_grad=(0, 1))
def product(a, b):
    a, b = a.contiguous(), b.contiguous()
    M, K = a.shape
    N = b.shape[1]
    c = torch.zeros(M, N, device=a.device, dtype=a.dtype)
    product_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 16))](a, b, c, M, N, K, BM=16, BN=16, BK=16)
    return c


def make_args(dims, device="cuda", dtype=torch.float32):
    a = torch.randn(dims["M"], dims["K"], device=device, dtype=dtype)
    return a, torch.randn(dims["K"], dims["N"], device=device, dtype=dtype)
"""
COUNTED = ("i in range(0, steps)", "i * BK", "i == steps - 1")
BY_BLOCKS = ("k0 in range(0, K, BK)", "k0", "k0 + BK >= K")
DIMS = [{"M": 5, "N": 40, "K": 50}, {"M": 17, "N": 20, "K": 33}, {"M": 16, "N": 16, "K": 16}]


def source_of(loop: str, start: str, test: str, value: str = "acc") -> str:
    return SOURCE.replace("LOOP", loop).replace("START", start).replace("TEST", test).replace("VALUE", value)


@pytest.mark.parametrize(
    ("loop", "start", "test"),
    [
        COUNTED,
        ("i in range(steps)", "i * BK", "i + 1 == steps"),
        ("i in range(tl.cdiv(K, BK))", "i * BK", "i == tl.cdiv(K, BK) - 1"),
        BY_BLOCKS,
        ("k0 in range(0, K, BK)", "k0", "k0 >= K - BK"),
        ("i in range(4)", "i * BK", "i == 3"),
    ],
)
@pytest.mark.parametrize("value", ["acc", "(acc + start)"])
def test_store_in_the_last_step__is_a_store_behind_the_loop(
    loop: str, start: str, test: str, value: str, write: Callable[[str], Path]
) -> None:
    text = source_of(loop, start, test, value.replace("start", start))
    file = write(text)
    result = draft(file, DIMS[0])
    assert result["report"]["tape_bytes"] == 0
    assert result["report"]["atomics"] == 0
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


@pytest.mark.parametrize(
    ("loop", "start", "test", "edit"),
    [
        (*COUNTED, ("# what follows", "acc += 1.0")),  # the step goes on
        (*BY_BLOCKS, ("# what follows", "acc += 1.0")),
        ("i in range(steps)", "i * BK", "i == 0", ("", "")),
        (*COUNTED, ("acc * acc", "acc * acc + tl.sum(x)")),  # of the step itself
        (
            *COUNTED,
            ("        if i ==", "        if i != steps - 1:\n            acc = acc * 0.5\n        elif i =="),
        ),
    ],
)
def test_store_in_one_step__has_the_gradient_of_that_step(
    loop: str, start: str, test: str, edit: tuple[str, str], write: Callable[[str], Path]
) -> None:
    file = write(source_of(loop, start, test).replace(*edit) if edit[0] else source_of(loop, start, test))
    result = draft(file, DIMS[0])
    assert_right(file, result, [(dims, "normal") for dims in DIMS])


@pytest.mark.parametrize(
    "test", ["i >= steps - 2", "i != steps - 1", "i <= 1", "i == rk_last", "i + 2 >= steps"]
)
def test_store_in_several_steps__is_refused(test: str, write: Callable[[str], Path]) -> None:
    source = source_of("i in range(steps)", "i * BK", test)
    file = write(
        source.replace("        acc +=", "        rk_last = tl.minimum(i, steps - 1)\n        acc +=")
    )
    with pytest.raises(errors.Unusable, match="in every step of the loop"):
        draft(file, DIMS[0])


def test_last_step_of_no_step__stores_nothing(write: Callable[[str], Path]) -> None:
    """With fewer than 16 channels there is no whole step: the output keeps its zeros."""
    source = source_of("i in range(K // BK)", "i * BK", "i == K // BK - 1")
    file = write(source)
    result = draft(file, DIMS[0])
    assert_right(file, result, [({"M": 5, "N": 40, "K": k}, "normal") for k in (16, 40)])
    assert found(file, result["backward"], [({"M": 5, "N": 20, "K": 9}, "normal")]) == {
        "a": [0.0],
        "b": [0.0],
    }


PASSES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 4, "N": 40}]


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = -float("inf")
    total = 0.0
    for turn in RANGE:
        for start in range(0, n, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n + c, mask=c < n, other=-float("inf"))
            if turn == 0:
                new = tl.maximum(top, tl.max(x, axis=0))
                total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), axis=0)
                top = new
            else:
                tl.store(y_ptr + row * n + c, tl.exp(x - top) / total, mask=c < n)


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""


@pytest.mark.parametrize("steps", ["tl.static_range(2)", "range(2)", "tl.static_range(0, 2)"])
def test_passes_over_a_row__are_read_one_by_one(steps: str, write: Callable[[str], Path]) -> None:
    file = write(PASSES.replace("RANGE", steps))
    result = draft(file, {"M": 4, "N": 40})
    assert result["report"]["tape_bytes"] == 0
    assert result["report"]["atomics"] == 0
    assert_right(file, result, [({"M": m, "N": n}, "normal") for m, n in ((4, 40), (3, 16))])

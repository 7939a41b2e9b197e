"""Values that the backward reads back from what the forward stored: lanes that were not stored stay
harmless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft, errors

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 9, "K": 20}]


def make_args(dims, device="cuda", dtype=torch.float32):
    m, n, k = dims["M"], dims["N"], dims["K"]
    return tuple(torch.rand(s, device=device, dtype=dtype) + 0.5 for s in ((m, k), (k, n)))

"""
PRODUCT = """
@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    r, c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + r[:, None] * K + k[None, :], mask=(r[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + c[None, :], mask=(k[:, None] < K) & (c[None, :] < N), other=0.0)
        total += tl.dot(a, b, input_precision="ieee")
    out = {value}
    tl.store(c_ptr + r[:, None] * N + c[None, :], out, mask=(r[:, None] < M) & (c[None, :] < N))


@autodiff(inputs_require_grad=(0, 1))
def product(a, b):
    c = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(a.shape[0], 16), triton.cdiv(b.shape[1], 16))
    product_kernel[grid](a, b, c, a.shape[0], b.shape[1], a.shape[1], BLOCK=16)
    return c
"""
VALUES = [
    "tl.sqrt(total * total + 0.6)", "tl.rsqrt(total * total + 0.6)", "tl.exp(-total * 0.1)", "1.0 / (total + 0.7)",
    "tl.sigmoid(total * 0.1)", "tl.log(total + 1.5)",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_masked_lane_of_a_product__does_not_reach_the_others(
    value: str, write: Callable[[str], Path]
) -> None:
    file = write(HEAD + PRODUCT.replace("{value}", value))
    result = draft(file, {"M": 5, "N": 9, "K": 20})
    shapes = [{"M": m, "N": n, "K": k} for m, n, k in ((5, 9, 20), (16, 16, 16), (1, 17, 3))]
    assert_right(file, result, [(dims, "normal") for dims in shapes])


CELL = """
@triton.jit
def cell_kernel(a_ptr, w_ptr, h_ptr, M, K, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    w = tl.load(w_ptr)
    h = tl.full([BLOCK], 1.0, tl.float32)
    for k in range(K):
        a = tl.load(a_ptr + r * K + k, mask=r < M, other=0.0)
        h = tl.sqrt(h) * w + a
        tl.store(h_ptr + k * M + r, h, mask=r < M)


@autodiff(inputs_require_grad=(0, 1))
def cell(a, w):
    h = torch.empty((a.shape[1], a.shape[0]), device=a.device, dtype=a.dtype)
    cell_kernel[(1,)](a, w, h, a.shape[0], a.shape[1], BLOCK=16)
    return h
"""


def test_masked_lane_of_a_state__does_not_reach_the_others(write: Callable[[str], Path]) -> None:
    file = write(HEAD + CELL)
    result = draft(file, {"M": 5, "N": 9, "K": 20})
    assert "read back" in result["backward"]
    shapes = [{"M": m, "N": 3, "K": k} for m, k in ((5, 20), (16, 4), (1, 1))]
    assert_right(file, result, [(dims, "normal") for dims in shapes])


SOFTMAX = """
@triton.jit
def softmax_kernel(x_ptr, y_ptr, total_ptr, N, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * N + cols, y, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def softmax(x):
    y, total = torch.empty_like(x), torch.empty_like(x[:, 0])
    softmax_kernel[(x.shape[0],)](x, y, total, x.shape[1], BLOCK=32)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""
ROWS = [{"M": 5, "N": 9}, {"M": 1, "N": 32}, {"M": 3, "N": 1}]


def test_row_that_took_a_sum__may_be_read_back__where_nothing_else_is_made_of_it(
    write: Callable[[str], Path],
) -> None:
    file = write(HEAD + SOFTMAX)
    plain, asked = (draft(file, ROWS[0], config=config) for config in (None, {"outputs": 1}))
    assert {"outputs": 1} in plain["report"]["configs"] and "read back" not in plain["backward"]
    kernel = asked["backward"].partition("# upstream")[2].partition("def laid_out")[0]
    kernel = "".join(line.partition("#")[0] for line in kernel.splitlines())
    assert kernel.count("tl.load(") == 2 and kernel.count("tl.sum(") == 1 and "tl.exp(" not in kernel
    for result in (plain, asked):
        assert_right(file, result, [(dims, "normal") for dims in ROWS])


def test_row_that_is_summed_again__is_not_read_back(write: Callable[[str], Path]) -> None:
    again = "    tl.store(total_ptr + row, tl.sum(y * y, axis=0))\n\n\n@autodiff"
    text = SOFTMAX.replace("\n\n@autodiff", again, 1).replace("return y", "return y, total")
    file = write(HEAD + text)
    result = draft(file, ROWS[0], config={"outputs": 1})
    assert {"outputs": 1} not in result["report"]["configs"] and "read back" not in result["backward"]
    assert_right(file, result, [(dims, "normal") for dims in ROWS])


SHIFTED = [
    ('    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf"))\n',
     '    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=-float("inf")) + tl.load(b_ptr)\n'),
    ("    e = tl.exp(x - tl.max(x, axis=0))\n    y = e / tl.sum(e, axis=0)\n",
     "    e = tl.exp(x)\n    y = e / (1.0 + tl.sum(e, axis=0))\n"),
    ("softmax_kernel(x_ptr,", "softmax_kernel(x_ptr, b_ptr,"),
    ("](x, y, total", "](x, b, y, total"),
    ("def softmax(x)", "def softmax(x, b)"),
    ("inputs_require_grad=(0,)", "inputs_require_grad=(0, 1)"),
    ("device=device, dtype=dtype),)", "device=device, dtype=dtype), torch.rand(1, device=device, dtype=dtype))"),
]  # fmt: skip


@pytest.mark.parametrize("other", ["-inf", "0.0"])
def test_row_that_is_read_back__has_what_it_had_in_lanes_that_were_not_stored(
    other: str, write: Callable[[str], Path]
) -> None:
    """All lanes of it meet in the gradient of a number that is added to the row."""
    text = SOFTMAX
    for old, new in SHIFTED:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = write(HEAD + text.replace('-float("inf")', "0.0" if other == "0.0" else '-float("inf")'))
    result = draft(file, ROWS[0], config={"outputs": 1})
    assert ("read back" in result["backward"]) == (other == "-inf")
    assert_right(file, result, [(dims, "normal") for dims in ROWS[:2]])


def test_what_is_stored_rounded__is_not_read_back__where_the_draft_is_to_be_exact(
    write: Callable[[str], Path],
) -> None:
    """Of a sigmoid near one, the half that was stored leaves little of what it is from one."""
    file, dims = (
        write(HEAD + PRODUCT.replace("{value}", "tl.sigmoid(total * 0.2)")),
        {"M": 5, "N": 9, "K": 20},
    )
    worst = {}
    for config in (None, {"exact": 1}):
        result = draft(file, dims, dtype="bfloat16", config=config)
        assert result["report"]["rounded"] == (config is None) == ("read back" in result["backward"])
        found = errors(file, result["backward"], [(dims, "normal")] * 3, "bfloat16")
        worst[result["report"]["rounded"]] = max(map(max, found.values()))
    assert worst[False] < 0.01 and worst[True] > 0.03, worst
    whole = [draft(file, dims, config=config) for config in (None, {"exact": 1})]
    assert whole[0]["backward"] == whole[1]["backward"] and not whole[0]["report"]["rounded"]


CARRIED = """
@triton.jit
def decayed_kernel(x_ptr, y_ptr, T, N, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(0, T):
        h = h * h * 0.5 + tl.load(x_ptr + t * N + c, mask=c < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + t * N + c, h, mask=c < N)


@autodiff(inputs_require_grad=(0,))
def decayed(x):
    y = torch.empty_like(x)
    decayed_kernel[(triton.cdiv(x.shape[1], 16),)](x, y, x.shape[0], x.shape[1], BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.rand(dims["T"], dims["N"], device=device, dtype=dtype),)
"""


def test_state_that_is_stored_rounded__is_taped__where_the_draft_is_to_be_exact(
    write: Callable[[str], Path],
) -> None:
    file, dims = write(HEAD + CARRIED), {"T": 6, "N": 20}
    plain, exact = (draft(file, dims, dtype="bfloat16", config=c) for c in (None, {"exact": 1}))
    assert plain["report"]["rounded"] and plain["report"]["tape_bytes"] == 0
    assert not exact["report"]["rounded"] and exact["report"]["tape_bytes"] > 0
    for result in (plain, exact):
        assert_right(file, result, [(dims, "normal")], 0.05, "bfloat16")

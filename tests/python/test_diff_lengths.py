"""States over sequences whose lengths are data: read back where each step stored them, else on a tape that is
as long as the longest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 11, "C": 11}]


@triton.jit
def gate_kernel(x, a, h, last, y, cu, C, BLOCK: tl.constexpr):
    n, c = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(cu + n)
    length = tl.load(cu + n + 1) - first
    decay = tl.load(a)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    for t in range(length):
        at = (first + t) * C + c
BODY
    tl.store(last + n * C + c, tl.sin(state), mask=c < C)


@autodiff(inputs_require_grad=(0, 1))
def gate(x, a, cu):
    h, y = torch.empty_like(x), x.new_zeros(x.shape[0])
    last = x.new_empty(len(cu) - 1, x.shape[1])
    block = triton.next_power_of_2(x.shape[1])
    gate_kernel[(len(cu) - 1,)](x, a, h, last, y, cu, x.shape[1], BLOCK=block)
    return h, last, y


def make_args(dims, device="cuda", dtype=torch.float32):
    T = dims["T"]
    cu = torch.tensor([0, T // 4, T // 4, T], device=device)
    x = torch.randn(T, dims["C"], device=device, dtype=dtype)
    return x, torch.rand(1, device=device, dtype=dtype), cu
"""
STORE = "        tl.store(h + at, state, mask=c < C)\n"
STEP = "        state = decay * state + tl.load(x + at, mask=c < C, other={})\n"
SUM = "        tl.store(y + first + t, tl.sum(state * state, axis=0))"
BODIES = {  # the body of the loop: whether what it stored is read back
    "stored before, all lanes summed": (STORE + STEP.format("0.0") + SUM, True),
    "stored after, all lanes summed": (STEP.format("0.0") + STORE + SUM, True),
    "stored after, nothing summed": (STEP.format("0.0") + STORE, True),
    "other lanes are not zero, and summed": (STEP.format("1.0") + STORE + SUM, False),
    "other lanes are not zero, stored before and summed": (STORE + STEP.format("1.0") + SUM, False),
    "other lanes are not zero, nor used": (STEP.format("1.0") + STORE, True),
    "not stored": (STEP.format("0.0") + SUM, False),
}


@pytest.mark.parametrize("name", sorted(BODIES))
def test_state_over_a_length_that_is_data__is_right(name: str, write: Callable[[str], Path]) -> None:
    body, stored = BODIES[name]
    file = write(SOURCE.replace("BODY", body))
    result = draft(file, {"T": 11, "C": 11})
    assert (result["report"]["tape_bytes"] == 0) == stored
    assert ("longest(grid" in result["backward"]) == (result["report"]["tape_bytes"] > 0)
    assert_right(file, result, [({"T": t, "C": c}, "normal") for t, c in ((11, 11), (3, 16), (20, 5))])


def test_value_that_is_stored_and_summed__keeps_the_lanes_that_are_not_stored(
    write: Callable[[str], Path],
) -> None:
    """What the forward stores in another type has a use besides: it is computed again, in all lanes."""
    body = (
        STEP.format("0.5")
        + "    half = tl.exp(state * decay).to(tl.float16)\n    tl.store(h + n * C + c, half, mask=c < C)\n"
        + "    tl.store(y + n, tl.sum(half.to(tl.float32), axis=0))"
    )
    source = SOURCE.replace("BODY", body).replace(
        "h, y = torch.empty_like(x)", "h, y = torch.zeros_like(x, dtype=torch.float16)"
    )
    file = write(source)
    result = draft(file, {"T": 11, "C": 11})
    assert_right(file, result, [({"T": t, "C": c}, "normal") for t, c in ((11, 11), (7, 5))], 2e-3)


TILES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 40, "most": 20}]


@triton.jit
def tile_kernel(x, y, lengths, N, BLOCK: tl.constexpr):
    n, tile, c = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    length = tl.load(lengths + n)
    end = tl.minimum((tile + 1) * BLOCK, tl.maximum(length, BLOCK - 4))
    there = tl.where(tile * BLOCK < length, 1, 0)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, there * end, BLOCK):
        part = tl.load(x + n * N + start + c, mask=start + c < end, other=0.0)
        state = tl.sin(state + part)
    tl.store(y + n * N + tile * BLOCK + c, state, mask=tile * BLOCK + c < N)


@autodiff(inputs_require_grad=(0,))
def tiles(x, lengths):
    y = torch.empty_like(x)
    tile_kernel[(x.shape[0], triton.cdiv(x.shape[1], 8))](x, y, lengths, x.shape[1], BLOCK=8)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.tensor([dims["most"], 3, 0], device=device, dtype=torch.int32)
    return torch.randn(3, dims["T"], device=device, dtype=dtype), lengths
"""


def test_length_that_hangs_on_bounds_and_conditions__has_a_tape_as_long_as_the_longest(
    write: Callable[[str], Path],
) -> None:
    file = write(TILES)
    result = draft(file, {"T": 40, "most": 20})
    assert "longest(grid" in result["backward"]
    assert_right(file, result, [({"T": t, "most": m}, "normal") for t, m in ((40, 20), (24, 24), (9, 1))])


STATES = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 32, "D": 11}]


@triton.jit
def state_kernel(k, v, a, states, y, D, CHUNKS, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    i, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    mask = (d[:, None] < D) & (d[None, :] < D)
    state, decay = tl.zeros([BLOCK, BLOCK], dtype=tl.float32), tl.load(a)
    for c in range(CHUNKS):
        tl.store(states + (c * D + d[:, None]) * D + d[None, :], state, mask=mask)
        rows = (c * CHUNK + i)[:, None] * D + d[None, :]
        keys = tl.load(k + rows, mask=d[None, :] < D, other=0.0)
        values = tl.load(v + rows, mask=d[None, :] < D, other=0.0)
        state = decay * state + tl.dot(tl.trans(keys), values, input_precision="ieee")
    tl.store(y + d[:, None] * D + d[None, :], tl.sin(state), mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def states_of(k, v, a):
    T, D = k.shape
    states, y = k.new_empty(T // 16, D, D), k.new_empty(D, D)
    state_kernel[(1,)](k, v, a, states, y, D, T // 16, CHUNK=16, BLOCK=16)
    return states, y


def make_args(dims, device="cuda", dtype=torch.float32):
    k, v = torch.randn(2, dims["T"], dims["D"], device=device, dtype=dtype)
    return k, v, torch.rand(1, device=device, dtype=dtype)
"""


def test_state_that_a_transposed_product_adds_to__is_read_back(write: Callable[[str], Path]) -> None:
    """Its lanes that were not stored are zero, as those of the product's rows are columns of a block."""
    file = write(STATES)
    result = draft(file, {"T": 32, "D": 11})
    assert result["report"]["tape_bytes"] == 0 and "tape_state" not in result["backward"]
    assert_right(file, result, [({"T": t, "D": d}, "normal") for t, d in ((32, 11), (64, 5), (16, 16))])


def test_state_that_rows_beyond_the_last_add_to__has_a_tape(write: Callable[[str], Path]) -> None:
    file = write(STATES.replace("other=0.0)\n        values", "other=1.0)\n        values"))
    result = draft(file, {"T": 32, "D": 11})
    assert "tape_state" in result["backward"]
    assert_right(file, result, [({"T": t, "D": d}, "normal") for t, d in ((32, 11), (64, 5), (16, 16))])

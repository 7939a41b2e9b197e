"""Programs that run together do what one after another does: the same bits, and the races are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import accesses, interpret, launches, rows, together
from triton.language.extra import libdevice

launches.set_mode("interpret")
PROGRAMS = 37


@triton.jit
def smaller(a, b):
    return tl.where(a < b, a, b)


@triton.jit
def elements_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    x, k = tl.load(x_ptr + at, mask=at < n), tl.load(k_ptr + at, mask=at < n, other=7)
    low = x.to(tl.bfloat16)
    y = tl.math.rsqrt(tl.abs(x) + 0.5) + tl.exp2(x) * libdevice.tanh(low.to(tl.float32)) + tl.erf(x)
    y += tl.fma(x, 2.0, y) - tl.sqrt(x * x) + (k % 5).to(tl.float32) * (k // 3) + (k >> 1) - (k & 6)
    y = tl.where((k ^ 3) > 4, tl.minimum(y, x), tl.maximum(-y, 1.0)) + tl.sigmoid(x) + tl.cdiv(k, 4)
    tl.store(y_ptr + at, tl.clamp(y, -9.0, 9.0) + tl.umulhi(k.to(tl.uint32), 1 << 31), mask=at < n)


@triton.jit
def shapes_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    pid = tl.program_id(0)
    i, j = tl.arange(0, 4), tl.arange(0, B // 4)
    x = tl.load(x_ptr + pid * B + i[:, None] * (B // 4) + j[None, :])
    cube = tl.reshape(x, [2, 2, B // 4])
    side = tl.permute(cube, (2, 0, 1))
    sums = tl.sum(side, axis=0) + tl.max(cube, axis=2) - tl.sum(tl.trans(x), axis=0).reshape([2, 2])
    a, b = tl.split(tl.join(tl.sum(x, axis=1), tl.min(x, axis=1)))
    both = tl.interleave(a, b) + tl.sum(tl.sum(x, axis=1, keep_dims=True) * pid)
    y = x + tl.reshape(sums, [4])[:, None] + tl.sum(both)
    tl.store(y_ptr + pid * B + i[:, None] * (B // 4) + j[None, :], y)


@triton.jit
def folds_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, B)
    x = tl.load(x_ptr + pid * B + at)
    square = tl.reshape(x, [4, B // 4])
    most, where = tl.max(square, axis=1, return_indices=True)
    y = tl.cumsum(x, axis=0) + tl.sort(x) + tl.argmin(x, axis=0) + tl.reduce(x, 0, smaller)
    y += tl.sum(most + where) + tl.xor_sum(tl.load(k_ptr + pid * B + at), axis=0)
    k = tl.load(k_ptr + pid * B + at) % B
    tl.store(y_ptr + pid * B + at, y + tl.gather(x, k, axis=0))


@triton.jit
def tiles_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    pid = tl.program_id(0)
    x_at = tl.make_block_ptr(x_ptr, (n // 4, 4), (4, 1), (pid * (B // 4), 0), (B // 4, 4), (1, 0))
    y_at = tl.make_block_ptr(y_ptr, (n // 4, 4), (4, 1), (pid * (B // 4), 0), (B // 4, 4), (1, 0))
    x = tl.load(x_at, boundary_check=(0,), padding_option="zero")
    product = tl.dot(x, tl.trans(x), input_precision="ieee")
    tl.store(y_at, tl.dot(product.to(tl.float16), x.to(tl.float16)), boundary_check=(0,))


@triton.jit
def ways_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    """As many turns as an element says, and a branch that depends on the program."""
    pid, at = tl.program_id(0), tl.arange(0, B)
    first, last = tl.load(k_ptr + pid) % 4, tl.load(k_ptr + pid + 1) % 7
    acc = tl.zeros([B], tl.float32)
    for turn in range(first, last):
        acc += tl.load(x_ptr + turn * B + at)
        if tl.max(acc) > 1.5:
            acc = acc * 0.5
    if pid % 3 == 0:
        tl.store(y_ptr + pid * B + at, acc + pid)
    else:
        tl.store(y_ptr + pid * B + at, acc - tl.load(x_ptr + pid))


@triton.jit
def adding_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, B)
    x, k = tl.load(x_ptr + pid * B + at), tl.load(k_ptr + pid * B + at)
    tl.atomic_add(y_ptr + k % B, x, mask=at < 9)
    tl.atomic_max(y_ptr + B + at, x)
    tl.atomic_add(y_ptr + 2 * B, tl.sum(x))


KERNELS = [elements_kernel, shapes_kernel, folds_kernel, tiles_kernel, ways_kernel, adding_kernel]


def launched(kernel: Any, block: int, n: int, order: str | int | None = "reversed") -> tuple[Any, list[str]]:
    """What three launches leave in memory, and the races of the last."""
    torch.manual_seed(block)
    x, k = torch.randn(PROGRAMS * block), torch.randint(0, 1000, (PROGRAMS * block,), dtype=torch.int32)
    for _ in range(3):
        y = torch.zeros(PROGRAMS * block)
        args = {"x_ptr": x, "k_ptr": k, "y_ptr": y, "n": n, "B": block}
        with accesses.judged(order, ordering=False) as judged:
            interpret.run(kernel, (PROGRAMS,), args)
    return y, judged.found


def alone(kernel: Any, monkeypatch: pytest.MonkeyPatch, *args: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(together, "MOST_TOGETHER", 1)
        return launched(kernel, *args)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_programs__together__do_what_they_do_one_by_one(
    kernel: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = PROGRAMS * block - 5
    y, races = launched(kernel, block, n)
    assert y.abs().sum() > 0
    expected, others = alone(kernel, monkeypatch, block, n)
    assert torch.equal(y, expected) and races == others


@pytest.mark.parametrize(
    ("kernel", "calls"),
    [(elements_kernel, 1), (shapes_kernel, 2), (tiles_kernel, 4), (ways_kernel, 4), (adding_kernel, 0)],
)
def test_programs__together__ask_few_calls_of_each(
    kernel: Any, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation does the others for all of them."""
    asked: list[Any] = []
    each = together.Together._each

    def seen(self: Any, step: Any, *rest: Any) -> Any:
        asked.append(step)
        return each(self, step, *rest)

    monkeypatch.setattr(together.Together, "_each", seen)
    launched(kernel, 64, PROGRAMS * 64)
    assert len({id(step) for step in asked}) <= calls


@triton.jit
def meeting_kernel(x_ptr, k_ptr, y_ptr, n, B: tl.constexpr, HOW: tl.constexpr):
    pid, at = tl.program_id(0), tl.arange(0, B)
    x = tl.load(x_ptr + pid * B + at)
    if HOW == "own":
        tl.store(y_ptr + pid * B + at, x + tl.load(y_ptr + pid * B + at))
        tl.store(y_ptr + pid * B + at, 2 * tl.load(y_ptr + pid * B + at))
    elif HOW == "same":
        tl.store(y_ptr + at, 3.0 + at)
    elif HOW == "two":
        tl.store(y_ptr + (pid // 2) * B + at, x)
    elif HOW == "edge":
        tl.store(y_ptr + pid * B + at, x, mask=at < B - 1)
        tl.store(y_ptr + pid * B + at + 1, x, mask=pid == 20)
    elif HOW == "last":
        tl.store(y_ptr + pid * B + at, x, mask=pid > 30)
        tl.store(y_ptr + at, tl.load(y_ptr + 36 * B + at), mask=pid == 3)
    elif HOW == "before":
        tl.store(y_ptr + pid * B + at, tl.load(y_ptr + pid * B + at - 1, mask=pid * B + at > 0, other=0.0))
    elif HOW == "atomic":
        tl.atomic_add(y_ptr + at, x)
    elif HOW == "both":
        tl.atomic_add(y_ptr + at, x)
        tl.store(y_ptr + pid * B + at, x)
    elif HOW == "parted":
        if pid % 2 == 0:
            tl.store(y_ptr + pid * B + at, x)
        else:
            tl.store(y_ptr + pid * B + at, tl.load(y_ptr + (pid - 1) * B + at))


HOWS = {"own": 0, "same": 0, "two": 1, "edge": 1, "last": 1, "before": 1, "atomic": 0, "both": 1, "parted": 1}


@pytest.mark.parametrize("order", [None, "reversed", 5])
@pytest.mark.parametrize(("how", "races"), HOWS.items())
def test_races__of_programs_together__are_found_and_none_is_made_up(
    how: str, races: int, order: str | int | None
) -> None:
    meeting_kernel.__dict__.pop("_kernel_agent_courses", None)
    for _ in range(3):  # the last launch has nothing more to learn
        y = torch.randn(PROGRAMS * 16 + 16)
        args = {"x_ptr": torch.randn(PROGRAMS * 16), "k_ptr": y, "y_ptr": y, "n": 0, "B": 16, "HOW": how}
        with accesses.judged(order, ordering=False) as judged:
            interpret.run(meeting_kernel, (PROGRAMS,), args)
        assert bool(judged.found) == bool(races), judged.found


def test_twin__that_fails__leaves_the_call_to_one_program_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = alone(shapes_kernel, monkeypatch, 16, PROGRAMS * 16)

    def unlike(*_: Any) -> Any:
        raise rows.Unlike

    monkeypatch.setattr(rows, "_broadcast", unlike)
    monkeypatch.setitem(rows._SHAPES, "create_broadcast", unlike)
    shapes_kernel.__dict__.pop("_kernel_agent_courses")
    for order in (None, "reversed", 11):
        assert torch.equal(launched(shapes_kernel, 16, PROGRAMS * 16, order)[0], expected)

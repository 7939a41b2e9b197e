"""Programs that follow a course do what the Python of the kernel does: the same bits, accesses and errors."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import accesses, courses, interpret, kernel_python, launches, together
from triton.language.extra import libdevice

SCALE = tl.constexpr(3.0)
OFFSET = 2


@triton.jit
def helper(x, y):
    s, c = tl.sin(x), tl.cos(y)
    return s * c, s - c


@triton.jit
def combine(a, b):
    return a * 0.5 + b


@triton.jit
def rows_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        at = start + cols
        acc += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
    mean = tl.sum(acc, axis=0) / n
    top = tl.max(acc, axis=0)
    for start in range(0, n, BLOCK):
        at = start + cols
        x = tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
        tl.store(y_ptr + row * n + at, (x - mean) * top * SCALE + OFFSET, mask=at < n)


@triton.jit
def causal_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(pid + 1):
        acc += tl.load(x_ptr + j * BLOCK + tl.arange(0, BLOCK), mask=j * BLOCK + tl.arange(0, BLOCK) < total)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, acc, mask=at < total)


@triton.jit
def persistent_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    part = tl.zeros([BLOCK], dtype=tl.float32)
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), total // n, tl.num_programs(0)):
        part += tl.load(x_ptr + row * n + at, mask=at < n, other=0.0)
        if row % 2 == 0:
            part = part * 0.5
    tl.atomic_add(y_ptr + at, part, mask=at < n)


@triton.jit
def backward_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = 0.0
    for t in range(n - 1, -1, -1):
        h = h * 0.5 + tl.load(x_ptr + row * n + t)
        tl.store(y_ptr + row * n + t, h)


@triton.jit
def branching_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 3:
        return
    x = tl.load(x_ptr + pid)
    turns = 0
    while (x < 4.0) and turns < 5:
        x = x * 2.0 + 0.5
        turns += 1
    if x > 6.0 or pid % 4 == 1:
        x = -x
    elif not (turns > 2):
        x = x + turns
    tl.store(y_ptr + pid, x)


@triton.jit
def many_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < total, other=0.0)
    a, b = helper(x, y=x + 1.0)
    c, d = tl.split(tl.join(a, b))
    square = tl.reshape(c, [4, BLOCK // 4])
    rows = tl.reduce(square, 1, combine)
    back = tl.associative_scan(d, 0, combine)
    for k in tl.static_range(3):
        back = back + k * libdevice.tanh(d)
    spread = tl.sum(square.T, axis=0)[:, None] + rows[:, None] + tl.zeros([4, BLOCK // 4], tl.float32)
    back = tl.clamp(back, -0.7, 0.9)
    low = back.to(tl.bfloat16).to(tl.float32) * tl.where(c > 0, 1.0, -1.0)
    tl.store(y_ptr + at, low + tl.reshape(spread, [BLOCK]), mask=at < total)


@triton.jit
def blocks_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x_at = tl.make_block_ptr(x_ptr, (total // n, n), (n, 1), (pid * 4, 0), (4, BLOCK), (1, 0))
    acc = tl.zeros([4, 4], dtype=tl.float32)
    for _ in range(tl.cdiv(n, BLOCK)):
        tile = tl.load(x_at, boundary_check=(0, 1), padding_option="zero")
        acc = tl.dot(tile, tl.trans(tile), acc, input_precision="ieee")
        x_at = tl.advance(x_at, (0, BLOCK))
    rows = pid * 4 + tl.arange(0, 4)
    at = rows[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(y_ptr + at, acc, mask=(rows[:, None] < total // n) & (at < total))


KERNELS = [
    rows_kernel, causal_kernel, persistent_kernel, backward_kernel, branching_kernel, many_kernel,
    blocks_kernel,
]  # fmt: skip
PROGRAMS = 9
launches.set_mode("interpret")  # helpers are called through what it puts in place


class Seen:
    """What an observer is told: how many elements of a size were accessed in a way."""

    def __init__(self) -> None:
        self.told: Counter[tuple[str, int]] = Counter()
        self.first = 0

    def _note(self, kind: str) -> Callable[[np.ndarray, int], None]:
        return lambda addresses, size: self.told.update({(kind, size): addresses.size})

    def __getattr__(self, kind: str) -> Any:
        return self._note(kind)


def launched(kernel: Any, n: int = 20, grid: int = PROGRAMS) -> tuple[torch.Tensor, Any, list[str]]:
    """What a launch leaves in memory, what was accessed, and its races."""
    torch.manual_seed(n)
    x = torch.randn(PROGRAMS * 32)
    y = torch.zeros_like(x)
    seen = Seen()
    with accesses.observe(seen), accesses.judged("reversed", ordering=False) as judged:
        interpret.run(kernel, (grid,), {"x_ptr": x, "y_ptr": y, "total": x.numel(), "n": n, "BLOCK": 16})
    return y, seen.told, judged.found


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is known of the kernels."""
    for kernel in KERNELS:
        kernel.__dict__.pop("_kernel_agent_courses", None)
    yield


def by_python(kernel: Any, n: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(together, "PROGRAMS_BEFORE", 1 << 30)
        return launched(kernel, n)


@pytest.mark.parametrize("limit", [None, "MOST_CALLS", "MOST_ANSWERS", "MOST_BYTES", "MOST_TOGETHER"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_course__does_what_python_does(
    kernel: Any, limit: str | None, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (courses, together):
        if limit in vars(module):
            monkeypatch.setattr(module, limit, 7)
    for n in (20, 20, 13, 30, 20):
        y, told, races = launched(kernel, n)
        assert y.abs().sum() > 0
        expected = by_python(kernel, n, monkeypatch)
        # Those that part meet at their atomics in another order.
        same = torch.allclose if kernel is persistent_kernel else torch.equal
        assert same(y, expected[0]) and (told, races) == expected[1:]


# Persistent programs have one turn more, or less, and even rows or odd ones: a branch of its own each.
@pytest.mark.parametrize(("kernel", "most"), [(rows_kernel, 3), (persistent_kernel, 14), (many_kernel, 3)])
def test_course__is_followed_without_python(
    kernel: Any, most: int, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = kernel_python.rewritten(kernel)
    runs = []

    def counted(**kwargs: Any) -> None:
        runs.append(1)
        own(**kwargs)

    monkeypatch.setitem(kernel.__dict__, "_kernel_agent_function", counted)
    for _ in range(3):
        launched(kernel)
    assert together.PROGRAMS_BEFORE < len(runs) <= most < 3 * PROGRAMS


@triton.jit
def failing_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.atomic_add(y_ptr, 1.0)
    where = tl.where(pid == 6, 1 << 20, pid)
    tl.atomic_add(y_ptr + 1, 1.0)
    x = tl.load(x_ptr + where)
    tl.store(y_ptr + 2, x)


def test_call_that_raises__is_told_at_its_line_and_nothing_is_done_twice() -> None:
    lines, first = inspect.getsourcelines(failing_kernel.fn)
    x, y = torch.randn(64), torch.zeros(8)
    with pytest.raises(accesses.OutOfBounds, match=r"program \(6, 0, 0\) reads out of bounds") as caught:
        interpret.run(failing_kernel, (9,), {"x_ptr": x, "y_ptr": y, "total": 64, "n": 1, "BLOCK": 16})
    line = first + next(at for at, text in enumerate(lines) if "tl.load" in text)
    places = [entry for entry in caught.traceback if str(entry.path) == __file__]
    assert places[-1].lineno + 1 == line
    assert y[:2].tolist() == [9.0, 9.0]


@triton.jit
def scaled_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(y_ptr + pid, FACTOR * tl.load(x_ptr + pid))


FACTOR = tl.constexpr(2.0)


def test_global_that_changes__is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launched(scaled_kernel)[0]
    assert torch.equal(launched(scaled_kernel)[0], before)
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(5.0))
    assert torch.allclose(launched(scaled_kernel)[0], 2.5 * before)
    monkeypatch.setattr(FACTOR, "value", 2.0)
    assert torch.equal(launched(scaled_kernel)[0], before)


@triton.jit
def counting_kernel(x_ptr, y_ptr, total, n, BLOCK: tl.constexpr):
    STATE.append(1)
    tl.store(y_ptr + tl.program_id(0), len(STATE) * 1.0)


STATE: list[int] = []


def test_python_with_state_of_its_own__is_not_followed() -> None:
    launched(counting_kernel)
    assert len(STATE) == PROGRAMS


@pytest.mark.parametrize(
    ("last", "step", "kind", "seen"),
    [(8, 2, tl.int32, [3, 5, 7]), (1 << 33, 1 << 30, tl.int64, [3 + (k << 30) for k in range(8)])],
)
def test_loop_from_a_tensor__counts_in_the_widest_type_of_its_bounds(
    last: int, step: int, kind: Any, seen: list[int]
) -> None:
    """Also where the type of its start is too narrow for what it comes to."""
    told = []

    @triton.jit
    def kernel(first, last, step):
        for i in range(first, last, step):
            note(i)

    def note(i: Any) -> None:
        told.append((i.dtype, i.handle.data.item()))

    kernel.fn.__globals__["note"] = note
    try:
        interpret.run(kernel, (1,), {"first": 3, "last": last, "step": step})
    finally:
        del kernel.fn.__globals__["note"]
    assert told == [(kind, value) for value in seen]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_course__holds_no_values_but_those_that_may_be_constant(kernel: Any, fresh: None) -> None:
    for n in (20, 13):
        launched(kernel, n)
    [course] = kernel.__dict__["_kernel_agent_courses"].values()
    rest = [course.first]
    while rest:
        stretch = rest.pop()
        rest += stretch.answers.values()
        assert all(course.unasked.issuperset(call.slots) for call in stretch.calls if call.made)
    assert course.constants.keys() <= course.unasked

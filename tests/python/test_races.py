"""Races between interpreted programs, and the orders in which programs run."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import accesses, launches, races, vocabulary
from kernel_agent.launches import launch_intercept


@pytest.fixture(autouse=True)
def interpreted():
    launches.set_mode("interpret")


def judged(launch, order=None) -> list[str]:
    """What is found in the launches that `launch()` makes."""
    found: list[str] = []

    def handler(made):
        with accesses.judged(order, vocabulary.ordering(made.kernel, made.args)) as seen:
            made.run()
        found.extend(seen.found)

    with launch_intercept(handler):
        launch()
    return found


@triton.jit
def add_kernel(x_ptr, y_ptr, HOW: tl.constexpr):
    p = tl.program_id(0)
    x = tl.load(x_ptr + p)
    if HOW == "plain":
        tl.store(y_ptr, tl.load(y_ptr) + x)
    elif HOW == "atomic":
        tl.atomic_add(y_ptr, x)
    elif HOW == "cleared":
        if p == 0:
            tl.store(y_ptr, 0.0)
        tl.atomic_add(y_ptr, x)
    elif HOW == "read":
        tl.atomic_add(y_ptr, x)
        tl.store(y_ptr + 1 + p, tl.load(y_ptr))
    elif HOW == "same":
        tl.store(y_ptr, 3.0)
    elif HOW == "different":
        tl.store(y_ptr, x)
    elif HOW == "carried":
        tl.store(y_ptr + p, x + tl.load(y_ptr + p - 1, mask=p > 0, other=0.0))
    elif HOW == "ahead":
        tl.store(y_ptr + p, tl.load(y_ptr + p + 1))
    elif HOW == "over":
        tl.atomic_add(y_ptr + 2, x)
        tl.store(y_ptr + p, x)
    elif HOW == "own":
        tl.store(y_ptr + p, tl.load(y_ptr + p) + x)
        tl.store(y_ptr + p, 2 * tl.load(y_ptr + p))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("plain", r"program \(1, 0, 0\) reads y_ptr\[0\], which program \(0, 0, 0\) stores to"),
        ("atomic", None),
        (
            "cleared",
            r"program \(1, 0, 0\) atomically updates y_ptr\[0\], which program \(0, 0, 0\) stores to",
        ),
        ("read", r"program \(1, 0, 0\) atomically updates y_ptr\[0\], which program \(0, 0, 0\) reads"),
        ("same", None),
        ("different", r"stores to y_ptr\[0\], which program \(0, 0, 0\) stores another value to"),
        ("carried", r"program \(1, 0, 0\) reads y_ptr\[0\], which program \(0, 0, 0\) stores to"),
        ("ahead", r"program \(1, 0, 0\) stores to y_ptr\[1\], which program \(0, 0, 0\) reads"),
        ("own", None),
    ],
)
def test_races__programs_that_meet__are_told_and_others_are_not(how, words):
    x, y = torch.randn(6), torch.zeros(8) if how == "atomic" else torch.randn(8)
    found = judged(lambda: add_kernel[(6,)](x, y, HOW=how))
    if words is None:
        assert found == []
    else:
        assert any(re.search(words, text) for text in found), found


@pytest.mark.parametrize("order", [None, "reversed"])
def test_races__store_after_own_atomic__meets_the_atomics_of_others(order):
    found = judged(lambda: add_kernel[(6,)](torch.randn(6), torch.zeros(8), HOW="over"), order)
    assert any("stores to y_ptr[2]" in text or "updates y_ptr[2]" in text for text in found), found


def test_races__one_program__has_none():
    assert judged(lambda: add_kernel[(1,)](torch.ones(1), torch.zeros(2), HOW="plain")) == []


def test_races__launches_in_turn__may_read_what_earlier_ones_wrote():
    x, y = torch.randn(4), torch.zeros(4)

    def both():
        add_kernel[(4,)](x, y, HOW="own")
        add_kernel[(4,)](y, torch.zeros(1), HOW="atomic")

    assert judged(both) == []


@triton.jit
def locked_kernel(x_ptr, y_ptr, lock_ptr, LOCK: tl.constexpr, EARLY: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0))
    before = 0.0
    if EARLY:
        before = tl.load(y_ptr)
    while tl.atomic_cas(lock_ptr + (0 if LOCK else tl.program_id(0)), 0, 1) == 1:
        pass
    if not EARLY:
        before = tl.load(y_ptr)
    tl.store(y_ptr, before + x)
    tl.atomic_xchg(lock_ptr + (0 if LOCK else tl.program_id(0)), 0)


@pytest.mark.parametrize(("lock", "early"), [(True, False), (False, False), (True, True)])
def test_races__atomics__order_what_is_between_them_and_no_more(lock, early):
    x, y, locks = torch.randn(4), torch.zeros(1), torch.zeros(4, dtype=torch.int32)
    found = judged(lambda: locked_kernel[(4,)](x, y, locks, LOCK=lock, EARLY=early))
    assert bool(found) == (not lock or early), found


@triton.jit
def halves_kernel(words_ptr, halves_ptr):
    p = tl.program_id(0)
    if p < 2:
        tl.store(words_ptr + p, p + 7)
    else:
        tl.store(halves_ptr + 3, 5.0)


def test_races__accesses_of_different_sizes__meet_in_their_bytes():
    words = torch.zeros(4, dtype=torch.int32)
    found = judged(lambda: halves_kernel[(3,)](words, words.view(torch.float16)))
    assert any("program (2, 0, 0) stores to" in text and "(1, 0, 0) stores another" in text for text in found)


@triton.jit
def table_kernel(table_ptr, N):
    p = tl.program_id(0)
    at = tl.load(table_ptr + p % N).to(tl.pointer_type(tl.float32))
    tl.store(at, tl.load(at) + 1.0)


@pytest.mark.parametrize("n", [1, 2])
def test_races__behind_a_table_of_addresses__are_found_too(n):
    y = torch.zeros(64)
    table = torch.tensor([y.data_ptr(), y[40:].data_ptr()])
    found = judged(lambda: table_kernel[(2,)](table, n))
    assert bool(found) == (n == 1)


@pytest.mark.parametrize("most", [0, 1 << 21])
def test_races__loads_that_wait_for_a_store__are_kept_in_sum(most, monkeypatch):
    monkeypatch.setattr(races, "_MOST_PENDING", most)
    assert judged(lambda: add_kernel[(4,)](torch.randn(4), torch.randn(8), HOW="ahead"))
    assert judged(lambda: add_kernel[(4,)](torch.randn(4), torch.randn(8), HOW="own")) == []


@triton.jit
def visit_kernel(y_ptr):
    p = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(y_ptr + p, p)


class Stores:
    """Which elements were stored to, in order."""

    def __init__(self, y: torch.Tensor):
        self.y, self.places = y, []

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.places += ((addresses.astype(np.int64) - self.y.data_ptr()) // size).tolist()


@triton.jit
def waits_kernel(count_ptr, seen_ptr):
    at = tl.atomic_add(count_ptr, 1)
    tl.store(seen_ptr + at, tl.program_id(0))


def visited(order) -> list[int]:
    stores = Stores(torch.zeros(6, dtype=torch.int32))
    with accesses.observe(stores):
        judged(lambda: visit_kernel[(3, 2)](stores.y), order)
    return stores.places


def test_order__reversed_or_drawn__visits_every_program_once():
    assert visited(None) == list(range(6))
    assert visited("reversed") == list(range(5, -1, -1))
    drawn = visited(3)
    assert sorted(drawn) == list(range(6)) and drawn != visited(None)
    assert visited(3) == drawn


def test_order__kernel_that_may_wait_for_others__runs_as_the_grid_says():
    count, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    assert judged(lambda: waits_kernel[(6,)](count, seen), "reversed") == []
    assert seen.tolist() == list(range(6))


@pytest.mark.parametrize("kind", ["load", "atomic"])
@pytest.mark.parametrize("seed", range(5))
def test_races__marks_of_many_programs__are_those_of_one_after_another(kind, seed):
    draw = np.random.default_rng(seed)
    one, many = races._Shadow(0, 60, 1), races._Shadow(0, 60, 1)
    for turn in range(4):
        epochs = np.sort(draw.choice(np.arange(1, 20), 7, replace=False)).astype(np.int32) + 20 * turn
        own = np.repeat(epochs, 9)
        places = draw.integers(0, 60, own.size)
        for epoch in epochs:
            one.mark(kind, places[own == epoch], int(epoch), int(epoch))
        many.mark(kind, places, own, 0)
        for name in ("stored", "updated", "updated_before", "read", "read_before"):
            assert np.array_equal(getattr(one, name), getattr(many, name)), name

"""What kernels may name and be given."""

from __future__ import annotations

import collections
import math

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import launches, vocabulary
from kernel_agent.launches import launch_intercept
from triton.language.extra import libdevice

SIZE = 4
HALF = tl.constexpr(0.5)
TWO = 2.0
HELD: dict[str, torch.Tensor] = {}
double = lambda x: x * 2
Pair = collections.namedtuple("Pair", ["a", "b"])


class Loud(collections.namedtuple("Loud", ["a"])):
    @property
    def shout(self):
        return self.a


class Odd(int):
    def __add__(self, other):
        return 0


@triton.jit
def helper(x):
    return libdevice.abs(x) * HALF


@triton.jit
def bad_helper(x):
    return double(x)


@triton.jit
def good_kernel(x_ptr, N, EXP: tl.constexpr, KIND: tl.constexpr = tl.float32, HOW: tl.constexpr = None):
    tl.static_assert(N > 0, "empty")
    i: tl.tensor = tl.arange(0, 4)
    x = tl.load(x_ptr + i, mask=i < min(N, SIZE), other=0.0)
    for k in tl.static_range(2):
        x += helper(x) + tl.math.exp(x) + math.pi + k
    if isinstance(HOW, tuple):
        x *= len(HOW)
    x = tl.reduce(x, 0, tl.standard._sum_combine)
    tl.store(x_ptr, EXP(x).to(KIND))


@triton.jit
def names_kernel(x_ptr, WHAT: tl.constexpr):
    if WHAT == 0:
        tl.store(x_ptr, double(1.0))
    elif WHAT == 1:
        HELD["x"].mul_(2)
    elif WHAT == 2:
        tl.store(x_ptr, torch.ones(1))
    else:
        tl.store(x_ptr, bad_helper(1.0))


@triton.jit
def module_kernel(x_ptr):
    tl.store(x_ptr, tl.core.inspect.stack())


def problems(launch, own=lambda fn: True) -> list[str]:
    found: list[str] = []
    launches.set_mode("interpret")
    with launch_intercept(lambda made: found.extend(vocabulary.problems(made.kernel, made.args, own))):
        launch()
    return found


@pytest.mark.parametrize(
    "how", [None, (1, 2), "text", Pair(1, 2.0), (tl.float32, (True, None)), tl.constexpr(3)]
)
def test_vocabulary__what_honest_kernels_use__is_fine(how):
    assert problems(lambda: good_kernel[(1,)](torch.ones(4), 4, EXP=tl.exp, HOW=how)) == []
    assert problems(lambda: good_kernel[(1,)](torch.ones(4), 4, EXP=helper, HOW=how)) == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (double, "the host function <lambda>"),
        ((1, double), "of type tuple"),
        (torch.ones(2), "a tensor"),
        ((torch.ones(2),), "of type tuple"),
        (Loud(3), "of type Loud"),
        (Odd(3), "of type Odd"),
        (tl.constexpr(double), "of type constexpr"),
        (bad_helper, "bad_helper uses double"),
        (torch, "the module torch"),
        (print, None),
        (eval, "the host function eval"),
        (HELD, "of type dict"),
    ],
)
def test_vocabulary__argument_that_runs_code__is_named(how, words):
    found = problems(lambda: good_kernel[(1,)](torch.ones(4), 4, EXP=tl.exp, HOW=how))
    assert found == [] if words is None else [words in text for text in found] == [True]


def test_vocabulary__names_of_the_module__are_looked_up_through_helpers():
    names = {
        text.split(" uses ")[1].split(",")[0]
        for text in problems(lambda: names_kernel[(1,)](torch.ones(4), 9))
    }
    assert names == {"double", "HELD", "torch.ones"}
    (text, *_) = problems(lambda: names_kernel[(1,)](torch.ones(4), 9))
    line = names_kernel.fn.__code__.co_firstlineno + 3
    assert text.startswith(
        f"line {line}: names_kernel uses double, which is the host function <lambda>: a kernel uses"
    )


def test_vocabulary__names_below_the_language__are_followed_to_their_end():
    assert any(
        "tl.core.inspect.stack" in text for text in problems(lambda: module_kernel[(1,)](torch.ones(4)))
    )


def test_vocabulary__kernels_of_the_user__may_name_what_they_like():
    assert problems(lambda: names_kernel[(1,)](torch.ones(4), 9), lambda fn: False) == []
    assert problems(lambda: names_kernel[(1,)](torch.ones(4), double), lambda fn: False) != []


def test_vocabulary__name_that_means_something_else_by_now__is_seen(monkeypatch):
    launch = lambda: good_kernel[(1,)](torch.ones(4), 4, EXP=tl.exp)
    assert problems(launch) == []
    monkeypatch.setitem(globals(), "SIZE", double)
    assert any("uses SIZE" in text for text in problems(launch))


@triton.jit
def counts_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1)


@triton.jit
def ticket(x_ptr):
    return tl.atomic_add(x_ptr, 1)


@triton.jit
def waits_kernel(x_ptr):
    tl.store(x_ptr + 1, ticket(x_ptr))


def test_ordering__atomics_whose_results_are_used__also_in_helpers():
    assert not vocabulary.ordering(counts_kernel, {})
    assert vocabulary.ordering(waits_kernel, {})

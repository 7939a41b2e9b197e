"""What a stub changes of its caller's and does no more with: running statistics, of which no Function can
return the new values where they belong to a view, or to a leaf that wants a gradient."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft

FORWARD = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 6, "C": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["C"], device=device, dtype=dtype)
    return x, torch.zeros(dims["C"], device=device, dtype=dtype), True


@triton.jit
def centre_kernel(x_ptr, mean_ptr, y_ptr, M, C, train: tl.constexpr, BLOCK: tl.constexpr):
    c, rows = tl.program_id(0), tl.arange(0, BLOCK)
    at, inside = rows * C + c, rows < M
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if train:
        mean = tl.sum(x, axis=0) / M
        kept = tl.load(mean_ptr + c)
        tl.store(mean_ptr + c, 0.75 * kept + 0.25 * mean)
    else:
        mean = tl.load(mean_ptr + c)
    d = tl.where(inside, x - mean, 0.0)
    tl.store(y_ptr + at, d * d * d, mask=inside)


@autodiff(inputs_require_grad=(0,))
def centred(x, mean=None, train=True):
    M, C = x.shape
    mean = x.new_zeros(C) if mean is None else mean
    y = torch.empty_like(x)
    centre_kernel[(C,)](x, mean, y, M, C, train=train, BLOCK=triton.next_power_of_2(M))
    return y
"""


def test_statistics_that_are_left_changed__are_no_outputs(write: Callable[[str], Path]) -> None:
    file = write(FORWARD)
    result = draft(file, {"M": 6, "C": 5})
    assert "mark_dirty(y_ptr)" in result["backward"]
    assert_right(file, result, [({"M": m, "C": c}, "normal") for m, c in ((6, 5), (16, 1), (1, 3))])


MORE = {
    "returned": ("    return y\n", "    return y, mean\n"),
    "used behind the launch": ("    return y\n", "    return y + mean.sum()\n"),
    "known by another name": ("    y = torch", "    also = mean[:]\n    y = torch"),
    "given to two launches": (
        "    centre_kernel[",
        "    other = torch.empty_like(x)\n"
        "    centre_kernel[(C,)](x, mean, other, M, C, train=False, BLOCK=triton.next_power_of_2(M))\n"
        "    centre_kernel[",
    ),
    "changed in a loop": ("    centre_kernel[", "    for _ in range(1):\n      centre_kernel["),
}


@pytest.mark.parametrize("name", MORE)
def test_statistics_that_the_stub_goes_on_with__are_outputs(write: Callable[[str], Path], name: str) -> None:
    old, new = MORE[name]
    file = write(FORWARD.replace(old, new, 1))
    result = draft(file, {"M": 6, "C": 5})
    assert re.search(r"ctx.mark_dirty\(.*\bmean_ptr, y_ptr", result["backward"])
    if name != "returned":  # what a stub was given is no output of it
        assert_right(file, result, [({"M": 6, "C": 5}, "normal")])


OLD = """    mean = tl.sum(x, axis=0) / M
    kept = tl.load(mean_ptr + c)
    tl.store(mean_ptr + c, 0.75 * kept + 0.25 * mean)
    d = tl.where(inside, x - mean, 0.0) * (1.0 + kept)
"""


def test_statistics_as_they_were__are_what_the_backward_has(write: Callable[[str], Path]) -> None:
    """The gradient of what is weighed by the old value, which the launch overwrites."""
    before, _, rest = FORWARD.partition("    if train:")
    text = before + OLD + rest.partition("x - mean, 0.0)\n")[2]
    file = write(text.replace("torch.zeros(dims", "torch.ones(dims"))
    result = draft(file, {"M": 6, "C": 5})
    assert "mark_dirty(y_ptr)" in result["backward"]
    assert_right(file, result, [({"M": m, "C": c}, "normal") for m, c in ((6, 5), (16, 1), (1, 3))])


def test_input_in_place_of_statistics_that_nobody_keeps__is_not_changed(write: Callable[[str], Path]) -> None:
    """None are wanted: x stands there, which no launch touches as long as it is so."""
    text = FORWARD.replace("x.new_zeros(C) if mean is None", "x if mean is None", 1)
    text = text.replace(
        "    if train:", "    if train:\n        mean = tl.sum(x, axis=0) / M\n    if track:", 1
    )
    text = text.replace("        mean = tl.sum(x, axis=0) / M\n        kept", "        kept", 1)
    text = text.replace("    else:\n        mean = tl.load", "    if not train:\n        mean = tl.load", 1)
    text = text.replace("train: tl.constexpr,", "train: tl.constexpr, track: tl.constexpr,", 1)
    text = text.replace("train=train,", "train=train, track=mean is not x,", 1)
    file = write(re.sub(r"return x, torch.zeros.*", "return x, None, True", text))
    result = draft(file, {"M": 6, "C": 5})
    assert "mark_dirty(y_ptr)" in result["backward"]
    assert "mean_ptr if track else None" in result["backward"]  # then it must lie elsewhere
    assert_right(file, result, [({"M": m, "C": c}, "normal") for m, c in ((6, 5), (16, 1), (1, 3))])

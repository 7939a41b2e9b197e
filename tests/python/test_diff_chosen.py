"""A value that was not chosen contributes nothing, also where its derivative is no number."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import draft, pair_text
from kernel_agent import forward

CHOICE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{{"N": 50}}]


@triton.jit
def choice_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask=mask, other=0.0)
    tl.store(y_ptr + i, {value}, mask=mask)


@autodiff(inputs_require_grad=(0,))
def choice(x):
    y = torch.empty_like(x)
    choice_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""

# value: (its derivative at -2, at 0 and at 3; an infinite one is a kink's, which is not asked for)
CHOICES = {
    "tl.where(x > 0, tl.sqrt(x), x * x)": (-4.0, 0.0, 0.5 / 3**0.5),
    "tl.where(x > 0, tl.sqrt(x) * tl.log(x), 2 * x)": (
        2.0,
        2.0,
        (0.5 * torch.log(torch.tensor(3.0)).item() + 1) / 3**0.5,
    ),
    "tl.where(x > 0, x, tl.exp(-60.0 * x) * 0.0)": (None, None, 1.0),
    "tl.where(x > 1, 1 / x, x)": (1.0, 1.0, -1 / 9),
    "tl.where(x == 0, 5.0, 1 / x)": (-0.25, 0.0, -1 / 9),
    "tl.where(x <= 0, x, tl.rsqrt(x))": (1.0, 1.0, -0.5 / 3**1.5),
    "tl.where(x > 0, x, tl.exp(40.0 * x) - 1)": (None, 40.0, 1.0),
    "tl.where(x > 0, 3 * x, 0.0) / tl.where(x > 0, x * x, 1.0)": (0.0, 0.0, -1 / 3),
}


@pytest.mark.parametrize("value", CHOICES)
def test_value_that_was_not_chosen__contributes_nothing(value: str, write: Callable[[str], Path]) -> None:
    file = write(CHOICE.format(value=value))
    result = draft(file, {"N": 50})
    with tempfile.TemporaryDirectory() as folder:
        pair = Path(folder) / "choice_pair.py"
        pair.write_text(pair_text(file.read_text(), result["backward"]))
        fwd = forward.load(pair)
        x = torch.tensor([-2.0, 0.0, 3.0, 300.0], requires_grad=True)
        with fwd.active():
            y = getattr(fwd.module, fwd.entry_name)(x)
            (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert bool(found.isfinite()[2:].all()), found
    for got, want in zip(found.tolist(), CHOICES[value], strict=False):
        assert want is None or got == pytest.approx(want, rel=1e-5), found

"""Gradients far out, where an exponential is infinite, or all that are summed are 0, and the output is a
number: they are those of float64, by formulas that are stable."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diff_support import draft, pair_text
from kernel_agent import forward
from kernel_agent.differentiate.reverse import saturation

Write = Callable[[str], Path]
Function = Callable[[torch.Tensor], torch.Tensor]

LANEWISE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff
from triton.language.extra import libdevice

SWEEP = [{"N": 50}]


@triton.jit
def lane_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, VALUE, mask=i < n)


@autodiff(inputs_require_grad=(0,))
def lanes(x):
    y = torch.empty_like(x)
    lane_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""

PLACES = (1e-30, 1e-6, 0.01, 0.5, 1, 3, 10, 15, 30, 44, 50, 86, 88, 89, 100, 1e3, 1e4, 1e10)
softplus, sigmoid = torch.nn.functional.softplus, torch.sigmoid


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def mish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(softplus(x))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


def sech(x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.exp(-x.abs()) / (1 + torch.exp(-2 * x.abs()))


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * softplus(-x))


def parts(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x.abs()) * torch.where(x > 0, 1 + torch.exp(-x.abs()), 1.0)


E = "tl.exp(-x)"
SOFTPLUS = "tl.log(1 + tl.exp(x))"
# The forward as it is written, and the same stably.
FUNCTIONS: dict[str, Function] = {
    f"x / (1 + {E})": silu,
    f"x / ({E} + 1.0)": silu,
    f"x * (1 / (1 + {E}))": silu,
    "x * (1.0 / (1.0 + tl.exp(-1.5 * x)))": lambda x: x * sigmoid(1.5 * x),
    "x / (1 + tl.exp2(-x * 1.4426950408889634))": silu,
    f"tl.fdiv(x, 1.0 + {E})": silu,
    "1 / (tl.exp(x) + 1)": lambda x: sigmoid(-x),
    f"3.0 / (2.0 + {E})": lambda x: 1.5 * sigmoid(x + math.log(2)),
    f"1 - 1 / (1 + {E})": lambda x: sigmoid(-x),
    f"1 / (1.0 - (-{E}))": sigmoid,
    f"1 / (0.5 * (2 + 2 * {E}))": sigmoid,
    "1 / (2 + libdevice.expm1(-x))": sigmoid,
    f"1 / ((1 + {E}) * (1 + {E}))": lambda x: sigmoid(x) ** 2,
    f"1 / (1 + {E} * {E})": lambda x: sigmoid(2 * x),
    f"libdevice.pow(1 + {E}, -1.5)": lambda x: torch.exp(-1.5 * softplus(-x)),
    f"1 / libdevice.pow(1 + {E}, 1.5)": lambda x: torch.exp(-1.5 * softplus(-x)),
    f"1 / (1 + (x * x) * {E})": lambda x: sigmoid(x - torch.log(x * x)),
    f"1 / (1 + {E} / (1 + x * x))": lambda x: sigmoid(x + torch.log(1 + x * x)),
    f"(x / (1 + {E}).to(tl.float64)).to(tl.float32)": silu,
    f"tl.rsqrt(1 + {E})": root,
    f"1 / tl.sqrt(1 + {E})": root,
    f"tl.exp(-0.5 * tl.log(1 + {E}))": root,
    f"x / (1 + tl.exp(-(x / (1 + {E}))))": lambda x: x * sigmoid(silu(x)),
    f"1 / (1 + tl.maximum({E}, 0.0))": sigmoid,
    f"1 / (1 + tl.where(x > 0, {E}, {E}))": sigmoid,
    f"tl.where(x >= 0, 1 / (1 + {E}), tl.exp(x) / (1 + tl.exp(x)))": sigmoid,
    f"x * libdevice.tanh({SOFTPLUS})": mish,
    f"x * (2 * tl.sigmoid(2 * {SOFTPLUS}) - 1)": mish,
    f"x * (2 * (1 / (1 + tl.exp(-2 * {SOFTPLUS}))) - 1)": mish,
    f"x * (1 - 2 / (tl.exp(2 * {SOFTPLUS}) + 1))": mish,
    "x * (1 - 2 / ((1 + tl.exp(x)) * (1 + tl.exp(x)) + 1))": mish,
    "x * libdevice.tanh(libdevice.log1p(tl.exp(x)))": mish,
    f"libdevice.tanh(tl.where(x > 100.0, x, {SOFTPLUS}))": lambda x: torch.tanh(softplus(x)),
    f"libdevice.tanh(tl.where(x > 20.0, {SOFTPLUS}, x))": torch.tanh,
    f"x * tl.exp(-{SOFTPLUS})": lambda x: x * sigmoid(-x),
    "2 / (1 + tl.exp(-2 * x)) - 1": torch.tanh,
    "1 - 2 / (tl.exp(2 * x) + 1)": torch.tanh,
    "0.5 * x * (2 - 2 / (tl.exp(1.5957691216057308 * (x + 0.044715 * x * x * x)) + 1))": gelu,
    "x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))": gelu,
    f"2 / (tl.exp(x) + {E})": sech,
    "1 / libdevice.cosh(x)": sech,
    "tl.exp(libdevice.sinh(x))": lambda x: torch.exp(torch.sinh(x.clamp(-50, 50))),
    "1 / tl.exp(x)": lambda x: torch.exp(-x),
    "1 / tl.exp2(x)": lambda x: torch.exp2(-x),
    "x / tl.exp(x * x)": lambda x: x * torch.exp(-x * x),
    f"tl.exp(-{E})": lambda x: torch.exp(-torch.exp(-x.clamp_min(-50))),
    "tl.minimum(tl.exp(x) + tl.exp(x) * tl.exp(x), 5.0)": lambda x: (
        torch.exp(x.clamp_max(9)) + torch.exp(2 * x.clamp_max(9))
    ).clamp_max(5),
    f"tl.where(x > 0, {E} + {E} * {E}, tl.exp(x))": parts,
    "tl.exp(0.5 * tl.log(tl.exp(x)))": lambda x: torch.exp(x / 2),
}


def gradient(file: Path, backward: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a forward makes of x, and the gradient of its sum by a drafted backward."""
    pair = file.with_name("pair.py")
    pair.write_text(pair_text(file.read_text(), backward))
    fwd = forward.load(pair)
    x = x.clone().requires_grad_()
    with fwd.active():
        y = getattr(fwd.module, fwd.entry_name)(x)
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y.detach(), found


def exact(function: Function, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.double().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.parametrize("value", FUNCTIONS)
def test_gradient__where_an_exponential_is_infinite__is_that_of_float64(value: str, write: Write) -> None:
    file = write(LANEWISE.replace("VALUE", value))
    backward = draft(file, {"N": 50})["backward"]
    x = torch.tensor([*PLACES, *(-place for place in PLACES)])
    y, found = gradient(file, backward, x)
    wanted, right = exact(FUNCTIONS[value], x)
    asked = y.isfinite() & ((y.double() - wanted).abs() <= 1e-5 + 1e-3 * wanted.abs())
    asked &= right.abs() < 3e38
    assert int(asked.sum()) >= 20
    off = (found.double() - right).abs()
    wrong = asked & ~(off <= 1e-6 + 1e-3 * right.abs())
    assert not bool(wrong.any()), (x[wrong], found[wrong], right[wrong], backward)


NO_NUMBER = {
    # the output is infinite, which a slow function's derivative, 0 there, would hide
    f"libdevice.tanh({SOFTPLUS}) + 0.1 * {SOFTPLUS}": 100.0,
    "1 / tl.sqrt(1 + tl.exp(x)) + tl.sqrt(1 + tl.exp(x))": 100.0,
    # the derivative at this point is 1
    "tl.log(1 + tl.exp(tl.log(x)))": 0.0,
    f"tl.log(1 + tl.exp(tl.log(tl.where(x > 2.0, {E}, x))))": 0.0,
}


@pytest.mark.parametrize("value", NO_NUMBER)
def test_gradient__that_is_not_known_to_be_0__stays_no_number(value: str, write: Write) -> None:
    file = write(LANEWISE.replace("VALUE", value))
    _, found = gradient(file, draft(file, {"N": 50})["backward"], torch.tensor([NO_NUMBER[value], 1.0]))
    assert not bool(found[0].isfinite()) and bool(found[1].isfinite())


STABLE = (
    "x * tl.sigmoid(x)",
    "tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))",
    "libdevice.tanh(tl.where(x < 0, 0.0, x) + tl.log(1 + tl.exp(tl.where(x < 0, x, -x))))",
    f"tl.where(x > 20.0, x, {SOFTPLUS})",
    f"libdevice.tanh(tl.where(x > 20.0, x, {SOFTPLUS}))",
    "libdevice.tanh(tl.where(0.5 * x < 20.0, tl.log(1 + tl.exp(0.5 * x)), x))",
    "tl.where(x > 0, x, tl.exp(x) - 1)",
    "1 / (1 + tl.exp(tl.minimum(x, 30.0)))",
    "1 / (1 + tl.exp(tl.clamp(x, -30.0, 30.0)))",
    "1 / (1 + tl.exp(-(x * x)))",
    "1 / (1 + tl.exp(x - tl.max(x, 0)))",
    "tl.exp(x) * 2",
    SOFTPLUS,
)


@pytest.mark.parametrize("value", STABLE)
def test_draft__of_what_is_stable_or_infinite_itself__has_no_guard(
    value: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(LANEWISE.replace("VALUE", value))
    backward = draft(file, {"N": 16})["backward"]
    monkeypatch.setattr(saturation, "find", lambda kernel: set())
    assert backward == draft(file, {"N": 16})["backward"]


ROWS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 37}]


@triton.jit
def log_1p(e):
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))


@triton.jit
def loss_kernel(z_ptr, target_ptr, loss_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * N + cols, mask=cols < N, other=-float("inf"))
    target = tl.load(target_ptr + row)
    top = tl.max(z, 0)
    others = tl.sum(tl.where(cols == target, 0.0, tl.exp(z - top)), 0)
    gap = top + tl.log(others) - tl.load(z_ptr + row * N + target)
    tl.store(loss_ptr + row, tl.maximum(gap, 0.0) + log_1p(tl.exp(-tl.abs(gap))))


@autodiff(inputs_require_grad=(0,))
def losses(z, target):
    loss = torch.empty(len(z), dtype=torch.float32, device=z.device)
    loss_kernel[(len(z),)](z, target, loss, z.shape[1], BLOCK=triton.next_power_of_2(z.shape[1]))
    return loss


def make_args(dims, device="cuda", dtype=torch.float32):
    z = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return z, torch.arange(dims["M"], device=device) % dims["N"]
"""


@pytest.mark.parametrize("scale", [1, 100, 1e4])
@pytest.mark.parametrize("width", [37, 16, 1])
def test_loss__of_rows_whose_other_exponentials_are_0__has_a_gradient(
    scale: float, width: int, write: Write
) -> None:
    """The sum leaves the target out: its logarithm is -infinite where the target is far ahead, or alone."""
    file = write(ROWS)
    pair = file.with_name("pair.py")
    pair.write_text(pair_text(ROWS, draft(file, {"M": 5, "N": 37})["backward"]))
    fwd = forward.load(pair)
    torch.manual_seed(3)
    target = torch.arange(9) % width
    z = torch.randn(9, width)
    z[::2, :] += 3 * torch.nn.functional.one_hot(target, width)[::2]
    z = (z * scale).requires_grad_()
    with fwd.active():
        loss = getattr(fwd.module, fwd.entry_name)(z, target)
        (found,) = torch.autograd.grad(loss.sum(), z)
    wide = z.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(wide, target, reduction="sum")
    (right,) = torch.autograd.grad(wanted, wide)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=2e-6)


COUNTED = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"M": 5, "N": 37}]


@triton.jit
def mean_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + cols, mask=cols < N, other=0.0)
    count = tl.sum((x > 0).to(TYPE), 0)
    mean = tl.where(count > 0, tl.sum(tl.maximum(x, 0.0), 0) / count, 0.0)
    tl.store(y_ptr + row * N + cols, x * x + mean, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def means(x):
    y = torch.empty_like(x)
    mean_kernel[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)
"""


@pytest.mark.parametrize("kind", ["tl.int32", "tl.float32"])
def test_mean__of_no_elements_in_whose_place_0_is_chosen__has_no_gradient(kind: str, write: Write) -> None:
    file = write(COUNTED.replace("TYPE", kind))
    torch.manual_seed(2)
    x = torch.randn(4, 37)
    x[2] = -x[2].abs()
    _, found = gradient(file, draft(file, {"M": 5, "N": 37})["backward"], x)
    _, right = exact(
        lambda x: x * x + (x.relu().sum(1) / (x > 0).sum(1).clamp_min(1)).unsqueeze(1).expand_as(x), x
    )
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


STEPS = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"T": 5, "N": 37}]


@triton.jit
def cell_kernel(x_ptr, y_ptr, T, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros((BLOCK,), tl.float32)
    for t in range(T):
        x = tl.load(x_ptr + t * N + cols, mask=cols < N, other=0.0)
        h = h / (1 + tl.exp(x - h)) + x / (1 + tl.exp(-x))
        tl.store(y_ptr + t * N + cols, h, mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def cells(x):
    y = torch.empty_like(x)
    cell_kernel[(triton.cdiv(x.shape[1], 16),)](x, y, x.shape[0], x.shape[1], BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["T"], dims["N"], device=device, dtype=dtype),)
"""


def cells(x: torch.Tensor) -> torch.Tensor:
    h, made = torch.zeros_like(x[0]), []
    for step in x:
        h = h * sigmoid(h - step) + silu(step)
        made.append(h)
    return torch.stack(made)


@pytest.mark.parametrize("size", [(5, 37), (3, 16), (1, 1)])
def test_gates_of_a_recurrence__that_are_shut__have_a_gradient(size: tuple[int, int], write: Write) -> None:
    file = write(STEPS)
    torch.manual_seed(4)
    x = torch.randn(size) * 100
    y, found = gradient(file, draft(file, {"T": 5, "N": 37})["backward"], x)
    wanted, right = exact(cells, x)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)

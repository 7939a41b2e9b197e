"""Lanes that begin above 0, and one tensor that a launch is passed twice: their gradients add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent.errors import Unusable

HEAD = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"n": 33}, {"n": 70}]


def make_args(dims, device="cpu", dtype=torch.float32):
    n = dims["n"]
    return (torch.randn(n, device=device, dtype=dtype), torch.randn(n, device=device, dtype=dtype))

"""
SPANS = """
@triton.jit
def kernel(x, w, y, n, B: tl.constexpr):
    p = tl.program_id(0)
    BODY


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
    y = torch.zeros_like(x)
    kernel[(triton.cdiv(x.numel(), WIDTH),)](x, w, y, x.numel(), B=16)
    return y
"""
LOADS = """o = p * WIDTH + tl.arange(0, B)
q = p * WIDTH + tl.arange(FIRST)
a = tl.load(x + o, mask=o < n, other=0.0)
b = tl.load(x + q, mask=q < n, other=0.0)
d = tl.load(w + q, mask=q < n, other=0.0)
"""
# By name: what is stored, how far the programs are apart, and where the other lanes begin.
BODIES = {
    "halves of a block": (
        LOADS + "tl.store(y + o, a * a, mask=o < n)\ntl.store(y + q, b * b * d, mask=q < n)",
        32,
        "B, 2 * B",
    ),
    "spans that overlap": (
        LOADS + "tl.store(y + o, a * a, mask=o < n)\n"
        "tl.store(y + q, b * b * d, mask=(q < n) & (q >= p * WIDTH + B))",
        24,
        "8, 24",
    ),
    "the next program's lanes": (LOADS + "tl.store(y + o, a * a * b + d, mask=o < n)", 16, "B, 2 * B"),
    "its own lanes, counted from above": (
        LOADS.replace("arange(FIRST)", "arange(FIRST) - 16") + "tl.store(y + q, b * b * d, mask=q < n)",
        16,
        "16, 32",
    ),
    "numbers of lanes in a sum": (
        LOADS + "s = tl.sum(b * tl.arange(FIRST), axis=0)\ntl.store(y + o, a * s, mask=o < n)",
        16,
        "4, 20",
    ),
    "rows and columns": (
        "r, c = tl.arange(2, 4), tl.arange(8, 16)\n"
        "o = p * WIDTH + (r[:, None] - 2) * 8 + c[None, :] - 8\n"
        "a = tl.load(x + o, mask=o < n, other=0.0)\n"
        "d = tl.load(w + o, mask=o < n, other=0.0)\n"
        "t = tl.sum(a * d * c[None, :], axis=0)\n"
        "tl.store(y + o, a * t[None, :] * r[:, None], mask=o < n)",
        16,
        "",
    ),
}
Made = Callable[[str], Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(text: str) -> Path:
        file = tmp_path / "stub.py"
        file.write_text(HEAD + text)
        return file

    return make


RAGGED = [({"n": n}, "normal") for n in (33, 70, 1, 16, 64)]


@pytest.mark.parametrize("schedule", [None, "atomic"])
@pytest.mark.parametrize("name", BODIES)
def test_lanes_that_begin_above_zero__have_the_gradient_of_their_addresses(made, name, schedule):
    body, width, first = BODIES[name]
    body = body.replace("FIRST", first).replace("WIDTH", str(width)).replace("\n", "\n    ")
    file = made(SPANS.replace("BODY", body).replace("WIDTH", str(width)))
    assert_right(file, draft(file, {"n": 33}, schedule=schedule), RAGGED)


TWICE = """
@triton.jit
def kernel(x, w, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + o, mask=o < n, other=0.0)
    b = tl.load(w + o, mask=o < n, other=0.0)
    tl.store(y + o, a * a * b, mask=o < n)


@autodiff(inputs_require_grad=(0, 1))
def stub(x, w):
    grid = (triton.cdiv(x.numel(), 16),)
    y = torch.empty_like(x)
    BODY
"""


@pytest.mark.parametrize(
    "body",
    [
        "kernel[grid](x, x, y, x.numel(), B=16); return y * w",
        "kernel[grid](x, x.detach(), y, x.numel(), B=16); return y * w",
        "z = x * w; kernel[grid](z, z.view(-1), y, x.numel(), B=16); return y",
        "z = torch.cat([x, w]); m = x.numel(); kernel[grid](z[:m], z[m // 2 :], y, m, B=16); return y",
    ],
)
def test_tensor_that_a_launch_is_passed_twice__has_the_sum_of_both_gradients(made, body):
    file = made(TWICE.replace("BODY", body))
    assert_right(file, draft(file, {"n": 33}), RAGGED)


@pytest.mark.parametrize(
    "body",
    [
        "z = x * 2.0; kernel[grid](z, z, z, x.numel(), B=16); return z * w",
        "z = x * 2.0; kernel[grid](z, w, z, x.numel(), B=16); return z * w",
        "z = x * 1.0; kernel[grid](z, z, y, 9, B=16)\n    kernel[grid](y, z, z, 9, B=16)\n    return z * w",
    ],
)
def test_tensor_that_a_launch_reads_and_writes_by_two_names__is_refused(made, body):
    with pytest.raises(Unusable, match="written and read"):
        draft(made(TWICE.replace("BODY", body)), {"n": 33})


NORMALISED = """
SWEEP = [{"m": 3, "n": 33}, {"m": 5, "n": 70}]


def make_args(dims, device="cpu", dtype=torch.float32):
    size = (dims["m"], dims["n"])
    return tuple(torch.randn(s, device=device, dtype=dtype) for s in (size, size, size[1:]))


@triton.jit
def kernel(x, res, w, n, eps, B: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, B)
    mask = tl.arange(0, B) < n
    s = tl.load(x + at, mask=mask, other=0.0) + tl.load(res + at, mask=mask, other=0.0)
    tl.store(res + at, s, mask=mask)
    g = tl.load(w + tl.arange(0, B), mask=mask, other=0.0)
    tl.store(x + at, s * tl.rsqrt(tl.sum(s * s, 0) / n + eps) * g, mask=mask)


@autodiff(inputs_require_grad=(0, 1, 2))
def stub(x, residual, weight, eps: float = 1e-6):
    BEFORE
    n = x.shape[-1]
    kernel[(x.shape[0],)](x, residual, weight, n, eps, B=triton.next_power_of_2(n))
    return RETURNED
"""


@pytest.mark.parametrize("returned", ["x, residual", "x", "residual * x"])
@pytest.mark.parametrize(
    "before", ["x, residual = x.clone(), residual.clone()", "x, residual = x * 1.0, residual * 2.0"]
)
def test_residual_that_is_added_and_normalised_in_place__of_copies__has_its_gradients(made, before, returned):
    file = made(NORMALISED.replace("BEFORE", before).replace("RETURNED", returned))
    cases = [({"m": m, "n": n}, "normal") for m, n in ((3, 33), (5, 70), (1, 3), (2, 64))]
    assert_right(file, draft(file, {"m": 3, "n": 33}), cases)


@pytest.mark.parametrize(
    "before", ["pass", "residual = residual.clone()", "residual = residual.clone(); x = x[:]"]
)
def test_residual_that_is_added_in_place__of_the_caller__is_refused_at_the_launch(made, before):
    file = made(NORMALISED.replace("BEFORE", before).replace("RETURNED", "x, residual"))
    with pytest.raises(Unusable, match=r"is an input that wants a gradient|is a view") as told:
        draft(file, {"m": 3, "n": 33})
    lines = file.read_text().splitlines()
    assert told.value.line is not None and "kernel[" in lines[told.value.line - 1]
    assert "a leaf" not in str(told.value)

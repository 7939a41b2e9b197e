"""Finite differences of real forwards: what they confirm, what they contradict, and what they leave open."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from kernel_agent import forward
from kernel_agent.operations import finite_differences, oracle
from oracle_support import KERNELS, stub

FAST = (
    "matmul",
    "softmax",
    "two_outputs",
    "in_place",
    "chunked_cross_entropy",
    "split_k",
    "embedding",
    "grouped_gemm",
)


def case_of(path: Path, dims: dict[str, Any] | None = None, seed: int = 5) -> oracle.Case:
    fwd = forward.load(path)
    upstream = {"kind": "normal", "seed": 9}
    case = {"id": 0, "dims": dims or fwd.sweep[0].dims, "seed": seed, "upstream": upstream}
    return oracle.Case(fwd, case, None)


def verdict(slope: dict[str, Any]) -> str:
    """The daemon's rule (agent/core/differences.c), for the tests of this side."""
    if any(slope[key] is None for key in ("analytic", "numeric", "spread", "noise")):
        return "open"
    size = max(abs(slope["analytic"]), abs(slope["numeric"]))
    unsure = slope["spread"] + slope["noise"]
    if unsure > 0.02 * size:
        return "open"
    return "agrees" if abs(slope["analytic"] - slope["numeric"]) <= 0.01 * size + 3 * unsure else "disagrees"


@pytest.mark.parametrize("path", [p for p in KERNELS if p.stem in FAST], ids=lambda path: path.stem)
def test_right_oracle__is_confirmed_for_every_input_and_contradicted_for_none(path: Path) -> None:
    found = finite_differences.finite_differences(case_of(path))
    assert found["skipped"] is None
    for name, slopes in found["slopes"].items():
        verdicts = [verdict(slope) for slope in slopes]
        assert "disagrees" not in verdicts and "agrees" in verdicts, name


def test_gradient_that_is_two_percent_off__is_contradicted(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(stub(write, "return square(x)"))
    right = oracle.Case.gradients
    monkeypatch.setattr(
        oracle.Case, "gradients", lambda *args: {name: 1.02 * grad for name, grad in right(*args).items()}
    )
    found = finite_differences.finite_differences(case)
    assert [verdict(slope) for slope in found["slopes"]["x"]] == ["disagrees"] * finite_differences.DIRECTIONS


def test_forward_that_computes_in_half_precision__takes_larger_steps_and_says_so(
    write: Callable[..., Path],
) -> None:
    exact = finite_differences.finite_differences(case_of(stub(write, "return square(x)")))["slopes"]["x"][0]
    body = "return square(x.to(torch.float32).to(torch.float16).to(torch.float32))"
    coarse = finite_differences.finite_differences(case_of(stub(write, body)))["slopes"]["x"][0]
    assert coarse["noise"] > 1e4 * exact["noise"] and coarse["step"] > 10 * exact["step"]
    assert verdict(coarse) != "disagrees"


@pytest.mark.parametrize(
    "body", ["y = square(x)\nreturn y * y.detach()", "return x + (torch.round(x) - x).detach()"]
)
def test_detached_value__is_an_intention_that_no_difference_can_see(
    body: str, write: Callable[..., Path]
) -> None:
    found = finite_differences.finite_differences(case_of(stub(write, body)))
    assert "detaches" in found["skipped"] and found["slopes"] == {}


def test_rounding_inside_a_kernel__is_left_open_or_flat(write: Callable[..., Path]) -> None:
    path = stub(write, "return square(x)")
    path.write_text(path.read_text().replace("x * x, mask", "tl.floor(x * 4) * x, mask"))
    verdicts = [verdict(s) for s in finite_differences.finite_differences(case_of(path))["slopes"]["x"]]
    assert "disagrees" not in verdicts


def test_forward_for_float32_alone__is_measured_in_float32(write: Callable[..., Path]) -> None:
    body = "assert x.dtype == torch.float32\nreturn square(x)"
    found = finite_differences.finite_differences(case_of(stub(write, body)))
    assert found["dtype"] == "float32"
    assert all(verdict(slope) == "agrees" for slope in found["slopes"]["x"])


def test_part_that_is_nothing_for_one_upstream__shows_with_another(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle knows no slope of a number that the host reads: it lacks sum(upstream * x * x)."""
    drawn = oracle.Case.upstreams

    def across(case: oracle.Case, outputs: list[Any]) -> dict[int, torch.Tensor]:
        (given,), (value,) = drawn(case, outputs).values(), (o.value.detach().double() for o in outputs)
        return {outputs[0].index: given - (given * value).sum() / value.square().sum() * value}

    monkeypatch.setattr(oracle.Case, "upstreams", across)
    case = case_of(stub(write, "return square(x) * x.detach().sum().item()"))
    monkeypatch.setattr(finite_differences, "detaches", lambda tape: False)
    verdicts = [verdict(s) for s in finite_differences.finite_differences(case)["slopes"]["x"]]
    assert verdicts == ["agrees", "disagrees", "disagrees", "disagrees"]


def test_kink_in_the_very_middle__is_left_open() -> None:
    """Equal largest values share the gradient, and no slope is theirs."""
    path = Path(__file__).parents[2] / "dataset/reduction_softmax/amax_ties_share_gradient.py"
    found = finite_differences.finite_differences(case_of(path, {"M": 29, "N": 22}))
    assert [verdict(slope) for slope in found["slopes"]["x"]] == ["open"] * finite_differences.DIRECTIONS


SCALED = """
@triton.jit
def scaled_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


"""


def test_number_of_the_host__is_rounded_and_no_kink(write: Callable[..., Path]) -> None:
    """A kernel takes a number of 32 bits: small steps of a forward in float64 climb its stairs. The oracle
    rounds it as well, so that nothing of it is seen in the noise."""
    body = "y = torch.empty_like(x)\nn = x.numel()\n"
    body += "scaled_kernel[(triton.cdiv(n, 128),)](x, y, x.sum().item(), n, BLOCK=128)\nreturn y"
    path = stub(write, body, before=SCALED)
    missed = []
    for seed in range(12):
        slopes = finite_differences.finite_differences(case_of(path, {"N": 100}, seed))["slopes"]["x"]
        if [verdict(slope) for slope in slopes].count("disagrees") < 2:
            missed.append(seed)
    assert not missed


@pytest.mark.parametrize(
    ("bends", "noise", "kink"),
    [
        ((1e-5, 5e-6, 2e-6), 0.0, False),  # curved: half a step, half the difference
        ((0.1, 0.1, 0.1), 0.0, True),
        ((0.1, 0.001, 0.0), 0.0, False),  # a kink at some distance
        ((0.1, 0.1, 0.1), 0.05, False),  # rounding
        ((0.1,), 0.0, False),
    ],
)
def test_kink__is_what_stays_as_steps_shrink(bends: tuple[float, ...], noise: float, kink: bool) -> None:
    steps = zip((1.0, 0.5, 0.2), bends, strict=False)
    tried = [finite_differences.Slope(step, 1.0, 1.0, noise, bend) for step, bend in steps]
    assert finite_differences.is_kink(tried) == kink


def test_kink_beside_the_middle_among_others__leaves_the_slope_open() -> None:
    """Each slope has both sides of it, so that they agree; others further away let what bends shrink."""
    bends, numerics = (2.1, 1.4, 0.98, 0.75), (-12.7, -12.5, -12.6, -12.6)
    steps = zip((1.0, 0.5, 0.2, 0.05), numerics, bends, strict=True)
    tried = [finite_differences.Slope(step, -11.85, numeric, 0.0, bend) for step, numeric, bend in steps]
    assert not finite_differences.is_kink(tried)
    assert verdict(finite_differences._trusted(tried, kink=False).to_dict()) == "open"
    smooth = [finite_differences.Slope(one.step, -11.85, -12.6, 0.0, 1e-3 * one.step) for one in tried]
    assert verdict(finite_differences._trusted(smooth, kink=False).to_dict()) == "disagrees"

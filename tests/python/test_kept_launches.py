"""Compiled kernels that libraries keep from one launch, and launch again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import launches
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import InterpretedFunction


class Compiled:
    """A stand-in for a compiled kernel: what is launched past everything."""

    name = "double_kernel"

    def __init__(self, direct: list[Any]) -> None:
        self.direct = direct

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args: self.direct.append((grid, args))


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("how", ["unseen", "benchmark", "timed"])
def test_kernel_kept_from_a_launch_of_which_nobody_was_told(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a library launches what was compiled for it once more: that is seen by who looks then."""
    ran: list[Any] = []
    direct: list[Any] = []

    def compile_and_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        ran.append((grid, args, kwargs))
        return Compiled(direct)

    launches.set_mode("interpret")
    for owner in (triton.JITFunction, Autotuner, Heuristics, InterpretedFunction):
        for name in ("run", "__call__", "_bench", "__init_subclass__"):
            if name in vars(owner):
                monkeypatch.setattr(owner, name, vars(owner)[name])  # put back in the end
    monkeypatch.setattr(triton.JITFunction, "run", compile_and_run)
    launches.set_mode("cuda")
    monkeypatch.setattr(launches._state, "measured", how == "timed")
    monkeypatch.setattr(launches._state, "benchmarking", int(how == "benchmark"))
    x, y, other = torch.ones(8), torch.zeros(8), torch.zeros(8)
    kept = double_kernel[lambda meta: (2,)](x, y, n=8, BLOCK=4)
    assert kept.name == "double_kernel" and len(ran) == 1
    kept[(2, 1, 1)](x, other, 8)
    assert direct == [((2, 1, 1), (x, other, 8))]  # as its user has it
    monkeypatch.setattr(launches._state, "benchmarking", 0)
    seen: list[launches.Launch] = []
    with launches.launch_intercept(seen.append):
        kept[(2, 1, 1)](other, y, 8)
    if how == "timed":
        assert not seen
        return
    assert len(direct) == 1 and [one.grid for one in seen] == [(2,)]
    assert seen[0].args["x_ptr"] is other and seen[0].args["y_ptr"] is y and seen[0].args["BLOCK"] == 4

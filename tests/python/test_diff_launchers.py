"""Launchers that libraries put around a jitted kernel: classes of their own that remember launches."""

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

SWEEP = [{"n": 100}, {"n": 1000}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["n"], device=device, dtype=dtype),)


class Entry(triton.KernelInterface):
    def __init__(self, fn):
        self.fn = fn
        self.arg_names = fn.arg_names
        self.kept = {}
"""
COUNTS = """
    def run(self, *args, **kwargs):
        self.kept[len(args)] = 1 + self.kept.get(len(args), 0)
        return self.fn.run(*args, **kwargs)
"""
# What was compiled for a key is launched once more, past everything around the kernel.
KEEPS = """
    def run(self, *args, **kwargs):
        grid, key = kwargs["grid"], tuple(a if isinstance(a, int) else a.dtype for a in args)
        if key not in self.kept:
            self.kept[key] = self.fn.run(*args, **kwargs)
            return self.kept[key]
        given = dict(zip(self.arg_names, args)) | kwargs
        if callable(grid):
            grid = grid(given | self.fn.best_config.kwargs)
        self.kept[key][(*grid, 1, 1)[:3]](given["x_ptr"], given["y_ptr"], given["n"])
"""
TAIL = """

@Entry
{tuned}@triton.jit
def square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(y_ptr + i, x * x, mask=i < n)


@autodiff(inputs_require_grad=(0,))
def fourth_power(x):
    x, n = x.contiguous(), x.numel()
    y, z = torch.empty_like(x), torch.empty_like(x)

    def grid(meta):
        return (triton.cdiv(n, meta["BLOCK"]),)

    square_kernel[grid](x, y, n{block})
    square_kernel[grid](y, z, n{block})
    return z
"""
PLAIN = TAIL.format(tuned="", block=", BLOCK=128")
TUNED = TAIL.format(tuned='@triton.autotune([triton.Config({"BLOCK": 128})], key=["n"])\n', block="")
SHAPES = [({"n": n}, "normal") for n in (1, 100, 1000)]


@pytest.mark.parametrize(
    "source",
    [HEAD + COUNTS + PLAIN, HEAD + COUNTS + TUNED, HEAD + KEEPS + TUNED],
    ids=["counts", "counts, tuned", "keeps"],
)
def test_launch_through_a_librarys_launcher__is_the_users(source: str, write: Callable[[str], Path]) -> None:
    file = write(source)
    result = draft(file, {"n": 100})
    assert result["backward"].count("class SquareKernel") == 2
    assert_right(file, result, SHAPES)


def test_launch_once_more_with_an_argument_too_few__says_how_many(write: Callable[[str], Path]) -> None:
    short = KEEPS.replace(', given["n"])', ")")
    with pytest.raises(Unusable, match="square_kernel, launched once more, takes 3 arguments, or 4 with its"):
        draft(write(HEAD + short + TUNED), {"n": 100})


OWN_TUNER = """

class Measuring(triton.runtime.Autotuner):
    \"\"\"Asks for the time of each configuration in a way of its own, and remembers the best.\"\"\"

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        if "best" not in self.cache:
            timings = {config: self._bench(*args, config=config, **kwargs) for config in self.configs}
            self.cache["best"] = min(timings, key=timings.get)
        self.best_config = self.cache["best"]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


def measuring(fn):
    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (64, 128)]
    return Measuring(fn, fn.arg_names, configs, ["n"], None, None)

"""


def test_autotuner_with_a_run_of_its_own__has_the_first_configuration_without_a_gpu(
    write: Callable[[str], Path],
) -> None:
    file = write(HEAD + COUNTS + OWN_TUNER + TAIL.format(tuned="@measuring\n", block=""))
    result = draft(file, {"n": 100})
    assert 'SQUARE_KERNEL_CONFIG = {"BLOCK": 64}' in result["backward"], result["backward"]
    assert_right(file, result, [({"n": 100}, "normal"), ({"n": 7}, "normal")])


@pytest.mark.parametrize("switch", ["torch.no_grad()", "torch.inference_mode()"])
def test_launcher_that_switches_gradients_off__launches_all_the_same(
    switch: str, write: Callable[..., Path]
) -> None:
    """What it does is done within the Function that takes the place of the launch."""
    quiet = COUNTS.replace("        return self.fn", f"        with {switch}:\n            return self.fn")
    file = write(HEAD + quiet + PLAIN)
    result = draft(file, {"n": 100})
    assert_right(file, result, [({"n": 100}, "normal"), ({"n": 1000}, "normal")])

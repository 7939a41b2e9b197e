"""Autotuners that choose together where several pairs of one forward are timed."""

from __future__ import annotations

import pytest
from kernel_agent import launches
from kernel_agent.forward import load

KERNEL = """
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

HOOK = None


CONFIGS = [triton.Config({"BLOCK": 16}, pre_hook=HOOK), triton.Config({"BLOCK": 32})]


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def double_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, 2.0 * tl.load(x_ptr + cols, mask=cols < N, other=0.0), mask=cols < N)


@autodiff(inputs_require_grad=(0,))
def double(x):
    y = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


SWEEP = [{"N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)
"""


@pytest.fixture
def tuner(tmp_path, monkeypatch):
    """The autotuner of a file with this text, having chosen nothing."""
    monkeypatch.setattr(launches._state, "choices", {})
    made = []

    def of(text=KERNEL):
        path = tmp_path / f"pair_{len(made)}.py"
        path.write_text(text)
        made.append(load(str(path), "interpret", "sm_90", "cpu").module.double_kernel)
        return made[-1]

    return of


def test_tuners__of_one_text__choose_once(tuner):
    first, second = tuner(), tuner()
    launches.share_choices(first)
    launches.share_choices(second)
    assert first is not second and first.cache is second.cache
    first.cache["key"] = first.configs[0]
    launches.share_choices(second)
    assert second.cache["key"] is first.configs[0]


@pytest.mark.parametrize(
    "other",
    [
        KERNEL.replace("2.0 *", "3.0 *"),
        KERNEL.replace('"BLOCK": 32', '"BLOCK": 64'),
        KERNEL.replace('key=["N"]', "key=[]"),
    ],
)
def test_tuners__of_other_texts_configurations_or_keys__choose_for_themselves(tuner, other):
    first, second = tuner(), tuner(other)
    launches.share_choices(first)
    launches.share_choices(second)
    assert first.cache is not second.cache


def test_tuners__whose_configurations_have_hooks__choose_for_themselves(tuner):
    text = KERNEL.replace("HOOK = None", "def HOOK(args):\n    pass\n")
    first, second = tuner(text), tuner(text)
    launches.share_choices(first)
    launches.share_choices(second)
    assert first.cache is not second.cache


def test_tuner__that_has_chosen_already__keeps_its_choice(tuner):
    first, second = tuner(), tuner()
    launches.share_choices(first)
    second.cache["key"] = second.configs[1]
    launches.share_choices(second)
    assert "key" not in first.cache and second.cache["key"] is second.configs[1]

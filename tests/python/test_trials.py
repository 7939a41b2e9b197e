"""What an autotuner does around its trials is no part of the graph that its caller records."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import launches
from triton.runtime.autotuner import Autotuner


@triton.jit
def add_one(x, y, n, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0) + 1.0, mask=o < n)


CONFIGS = [triton.Config({"B": 16}), triton.Config({"B": 32})]


def tuned(configs=CONFIGS, **options):
    """A tuner whose trials add to their second argument, as kernels do: without a graph."""
    changes = {"reset_to_zero": None, "restore_value": None} | options
    tuner = Autotuner(add_one, ["x", "y", "n"], list(configs), ["n"], **changes)
    seen = []

    def run(x, y, n, **_):
        seen.append((x.tolist(), y.tolist()))
        y.data.add_(1.0)

    tuner.fn = SimpleNamespace(run=run)
    tuner._do_bench = lambda call, quantiles: [call(), call(), [1.0] * 3][-1]
    return tuner, seen


@pytest.fixture
def compiled(monkeypatch):
    """Launchers as on a GPU, with the clock above in place of its own."""
    launches._install()
    monkeypatch.setattr(launches._state, "mode", "cuda")
    monkeypatch.setattr(launches, "_briefly", lambda call, **_: [call(), call(), [1.0] * 3][-1])


def bench(tuner, *args):
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    return tuner._bench(*args, config=tuner.configs[0])


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("leaf", [True, False])
def test_trial__that_restores_what_wants_a_gradient__leaves_values_and_graph(
    compiled, monkeypatch, measured, leaf
):
    monkeypatch.setattr(launches._state, "measured", measured)
    tuner, seen = tuned(restore_value=["y"])
    given = torch.arange(4.0, requires_grad=True)
    x = given if leaf else given * 3.0
    before, made_by = x.tolist(), x.grad_fn
    assert bench(tuner, x, x, 4)[0] == 1.0
    assert len(seen) == 2 and [y for _, y in seen] == [before, before]  # restored in between, too
    assert x.tolist() == before and x.grad_fn is made_by and x.requires_grad and torch.is_grad_enabled()
    (x * 2.0).sum().backward()
    assert given.grad.tolist() == [2.0 if leaf else 6.0] * 4


def test_trial__that_zeroes_what_wants_a_gradient__does_not_raise(compiled):
    tuner, seen = tuned(reset_to_zero=["y"])
    y = torch.arange(4.0, requires_grad=True)
    assert bench(tuner, y.detach().clone(), y, 4)[0] == 1.0
    assert [at for _, at in seen] == [[0.0] * 4] * 2 and y.grad_fn is None


def test_trial__with_a_hook_of_its_configuration__has_no_graph(compiled):
    hook = lambda given: given["y"].copy_(given["x"])
    tuner, seen = tuned([triton.Config({"B": 16}, pre_hook=hook)] * 2)
    x, y = torch.ones(4, requires_grad=True), torch.zeros(4, requires_grad=True)
    assert bench(tuner, x, y, 4)[0] == 1.0
    assert len(seen) == 2 and y.grad_fn is None and y.requires_grad


def test_launch_after_the_trials__is_recorded_as_it_was(compiled):
    """Only trials are out of the graph: what the launch that counts changes, its caller's graph has."""
    tuner, _ = tuned(restore_value=["y"], reset_to_zero=["y"])
    enabled = []
    tuner.fn = SimpleNamespace(run=lambda *_, **__: enabled.append(torch.is_grad_enabled()))
    y = torch.arange(4.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):  # zeroes an input for good, and not for a trial
        tuner.run(torch.ones(4), y, 4, grid=(1,), warmup=False)
    assert set(enabled) == {False}
    enabled.clear()
    tuner.run(torch.ones(4), y * 1.0, 4, grid=(1,), warmup=False)
    assert enabled[-1]

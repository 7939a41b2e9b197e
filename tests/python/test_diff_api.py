"""The differentiator from a plain script: what works, and what a wrong use says."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from diff_support import ROOT
from kernel_agent.differentiate import Refusal, api, autodiff, grad, rule

FILE = ROOT / "examples/swiglu.py"
DIMS = {"B": 2, "T": 3, "F": 70}


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("swiglu_of_a_script", FILE)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_grad__by_function_or_path__is_the_same_text() -> None:
    assert grad(module().swiglu, DIMS).text == grad(FILE, DIMS).text == grad(str(FILE), DIMS).text


def test_grad__on_a_cpu__calls_nothing_at_the_sizes_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    make = torch.randn

    def noted(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        drawn.append(math.prod(shape))
        return make(shape, **options)

    monkeypatch.setattr(torch, "randn", noted)
    assert grad(FILE, DIMS).text
    assert 0 < max(drawn) < 10**6


def test_grad__wrt_one_input__leaves_the_other_out() -> None:
    both, first, second = (grad(FILE, DIMS, wrt=wrt).text for wrt in ((0, 1), (0,), 1))
    assert len({both, first, second}) == 3
    assert len(first) < len(both) > len(second)


def test_autodiff__differentiates_in_a_script() -> None:
    script = module()
    args = script.make_args(DIMS, device="cpu", dtype=torch.float32)
    inputs = [a.requires_grad_() for a in args]
    autodiff(script.swiglu, DIMS)(*inputs).sum().backward()
    assert all(a.grad is not None and a.grad.any() for a in inputs)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (lambda: grad(3), TypeError, "marked with @autodiff or the path"),  # type: ignore[arg-type]
    "builtin": (lambda: grad(len), TypeError, "not builtin_function_or_method len"),
    "schedule": (
        lambda: grad(FILE, schedule="fast"),
        ValueError,
        "'fast' is none of owner, partials, atomic",
    ),
    "wrt": (lambda: grad(FILE, wrt=("weight",)), ValueError, "has no input 'weight'"),
    "position": (lambda: grad(FILE, wrt=7), ValueError, "has no input 7"),  # type: ignore[arg-type]
    "option": (lambda: grad(FILE, blocks=3), TypeError, "blocks"),  # type: ignore[call-arg]
    "no_file": (lambda: grad("/nowhere/x.py"), Exception, "cannot be read"),
    "bare_rule": (lambda: rule(lambda g, node, d: ()), TypeError, '@rule("my_op")'),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_use__says_what_is_expected(name: str) -> None:
    use, kind, message = WRONG[name]
    with pytest.raises(kind) as caught:
        use()
    assert message in str(caught.value)


def test_rule__with_too_few_adjoints__is_refused() -> None:
    rule("sigmoid")(lambda g, node, d: ())
    try:
        with pytest.raises(Refusal, match="one adjoint or None for each of 1 arguments"):
            grad(FILE, DIMS)
    finally:
        api.forget("sigmoid")

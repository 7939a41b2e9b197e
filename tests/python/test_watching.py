"""What autograd's engine computes for operations of the stub is no candidate's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_agent.formulas import engine_may
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = [
    "detach",
    "t",
    "transpose",
    "view",
    "unsqueeze",
    "expand",
    "new_zeros",
    "zeros",
    "scalar_tensor",
    "ones_like",
    "alias",
    "cat",
    "copy_",
    "flip",
    "new_empty_strided",
    "ones",
    "slice",
    "zeros_like",
]


class Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def of(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, requires_grad=True)


AT = torch.tensor([2, 1])
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "softmax": lambda: torch.softmax(of(3, 4), -1),
    "log_softmax": lambda: torch.log_softmax(of(3, 4), -1),
    "relu": lambda: torch.relu(of(3)),
    "leaky_relu": lambda: functional.leaky_relu(of(3)),
    "gelu": lambda: functional.gelu(of(3)),
    "silu": lambda: functional.silu(of(3)),
    "sigmoid": lambda: torch.sigmoid(of(3)),
    "tanh": lambda: torch.tanh(of(3)),
    "softplus": lambda: functional.softplus(of(3)),
    "layer_norm": lambda: functional.layer_norm(of(3, 4), (4,), of(4), of(4)),
    "mm": lambda: of(3, 4) @ of(4, 5),
    "bmm": lambda: torch.bmm(of(2, 3, 4), of(2, 4, 5)),
    "linear": lambda: functional.linear(of(2, 3, 4), of(5, 4), of(5)),
    "pow": lambda: of(3) ** 2.5,
    "sqrt": lambda: of(3).sqrt(),
    "rsqrt": lambda: of(3).rsqrt(),
    "reciprocal": lambda: of(3).reciprocal(),
    "log1p": lambda: of(3).log1p(),
    "sin": lambda: of(3).sin(),
    "cos": lambda: of(3).cos(),
    "abs": lambda: of(3).abs(),
    "where": lambda: torch.where(AT > 1, of(2), of(2)),
    "masked_fill": lambda: of(2).masked_fill(AT > 1, 0.0),
    "clamp": lambda: of(3).clamp(0.2, 0.8),
    "clamp_min": lambda: of(3).clamp(min=0.2),
    "maximum": lambda: torch.maximum(of(3), of(3)),
    "minimum": lambda: torch.minimum(of(3), of(3)),
    "amax": lambda: of(3, 4).amax(-1),
    "max": lambda: of(3, 4).max(-1).values,
    "max of all": lambda: of(3, 4).max(),
    "sort": lambda: of(3, 4).sort(descending=True).values,
    "topk": lambda: of(3, 4).topk(2).values,
    "cummax": lambda: of(3, 4).cummax(-1).values,
    "var": lambda: of(3, 4).var(-1),
    "std": lambda: of(3, 4).std(-1),
    "prod": lambda: of(3, 4).prod(-1),
    "expm1": lambda: of(3).expm1(),
    "erf": lambda: of(3).erf(),
    "exp2": lambda: of(3).exp2(),
    "log2": lambda: of(3).log2(),
    "elu": lambda: functional.elu(of(3)),
    "mish": lambda: functional.mish(of(3)),
    "hardswish": lambda: functional.hardswish(of(3)),
    "logsigmoid": lambda: functional.logsigmoid(of(3)),
    "cumprod": lambda: of(3, 4).cumprod(-1),
    "tril": lambda: of(4, 4).tril(),
    "triu": lambda: of(4, 4).triu(),
    "roll": lambda: of(3, 4).roll(1, -1),
    "lerp": lambda: torch.lerp(of(3), of(3), 0.3),
    "addcmul": lambda: torch.addcmul(of(3), of(3), of(3)),
    "baddbmm": lambda: torch.baddbmm(of(2, 3, 3), of(2, 3, 4), of(2, 4, 3)),
    "group_norm": lambda: functional.group_norm(of(2, 4, 3), 2),
    "conv": lambda: functional.conv1d(of(2, 3, 8), of(4, 3, 3)),
    "scatter": lambda: of(3, 4).scatter(1, torch.zeros(3, 1, dtype=torch.long), of(3, 1)),
    "scatter_add": lambda: of(3, 4).scatter_add(1, torch.zeros(3, 1, dtype=torch.long), of(3, 1)),
    "norm": lambda: torch.linalg.vector_norm(of(3, 4), dim=-1),
    "embedding": lambda: functional.embedding(AT, of(3, 4)),
    "gather": lambda: of(3, 4).gather(1, torch.zeros(3, 1, dtype=torch.long)),
}


@pytest.mark.parametrize("name", CALLS)
def test_engine__may_do_what_the_stubs_operation_is_differentiated_by(name: str) -> None:
    forward, backward = Noted(), Noted()
    with forward:
        y = CALLS[name]()
    upstream = torch.rand(y.shape)
    with backward:
        y.backward(upstream)
    found = backward.names - {f"aten::{move}" for move in MOVES}
    assert found <= engine_may(forward.names), (forward.names, found - engine_may(forward.names))
    assert found


def test_engine__may_do_nothing_for_operations_that_the_stub_has_not() -> None:
    assert "aten::_softmax_backward_data" not in engine_may(["aten::mul", "aten::empty"])
    assert "aten::mm" not in engine_may(["aten::relu"])


def test_engine__may_do_what_is_named_after_the_stubs_operation() -> None:
    assert "aten::gelu_backward" in engine_may(["aten::gelu_"])
    assert "aten::nll_loss_backward" in engine_may(["aten::nll_loss_forward"])
    assert "aten::gelu_backward" not in engine_may(["aten::relu"])


def test_engine__may_scatter_for_no_index_of_the_stub() -> None:
    """An index is honest in a backward, and what it is differentiated by adds up."""
    assert not {"aten::index_put", "aten::index_add"} & engine_may(["aten::index", "aten::index_select"])

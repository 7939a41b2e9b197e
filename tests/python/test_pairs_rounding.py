"""Gradients of pairs where large terms cancel: what rounding leaves of them must not be all there is.

Each of these had a backward by the usual formula that was right but for such inputs, and off by more than
eager PyTorch by orders of magnitude."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kernel_agent import forward

DATASET = Path(__file__).parents[2] / "dataset"


def errors(pair: str, args: list[Any], wanted: int, equal: bool = False) -> list[float]:
    """Norm-relative errors of the pair's gradients of the first `wanted` arguments, by its own reference.
    `equal`: the upstream is one number everywhere."""
    fwd = forward.load(str(DATASET / pair), "interpret", "sm_90", "cpu")
    assert fwd.reference is not None
    found: list[list[torch.Tensor]] = []
    entry = getattr(fwd.module, fwd.entry_name)
    for function, dtype in ((entry, torch.float32), (fwd.reference, torch.float64)):
        leaves = [arg.to(dtype).requires_grad_() for arg in args[:wanted]]
        with fwd.active():
            y = function(*leaves, *args[wanted:])
            upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            upstream = torch.full_like(upstream, 0.7) if equal else upstream
            found.append(list(torch.autograd.grad(y, leaves, upstream.to(dtype))))
    return [float((got - want).norm() / want.norm()) for got, want in zip(*found, strict=True)]


def test_slot_attention__slots_that_are_nearly_alike_beside_what_they_share() -> None:
    """All slots hold nearly the same large values, and keys: a softmax's gradient whose sum is not quite 0
    would be multiplied by them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    g = -5 + 2**-7 * torch.randn(1, 2, 16, 8)
    args = [q, 100 * k, (4 * v[..., :1] + 2**-7 * v).contiguous(), g]
    dq, dk, dv, dg = errors("linear_attention_ssm_rnn/gated_slot_attn_recurrent.py", args, 4)
    assert max(dq, dk) < 0.02 and max(dv, dg) < 1e-3


def test_supcon__samples_that_are_all_alike_and_long() -> None:
    """Each score is 14000 or so, and each softmax uniform, unless it is made by the logarithm of its sum. One
    sample has no positives: of the others little is left but what they give to it."""
    torch.manual_seed(0)
    x = (6 + 2**-7 * torch.randn(80)).expand(40, 80).contiguous()
    (dx,) = errors("loss/supcon_label_mask.py", [x, torch.arange(40) // 3, 0.2], 1, equal=True)
    assert dx < 2e-5

"""Maxima that a kernel only subtracts, so that nothing overflows.

`exp(x - m) / sum(exp(x - m))` is the same for any `m`. Autograd still follows the maximum that is taken for
it. In exact arithmetic nothing arrives there; in float32 the rounding of all the rest does, with its sign
turned, and takes that away from the gradient of the greatest element. Where one element has nearly all the
weight, or all share what gradients are multiplied by, they come out more exact by orders of magnitude than by
`p * (dp - sum(p * dp))`, which is what torch.softmax does, and kernels do. So the error that an honest
implementation has is that of an evaluation in which such maxima are constants.
"""

from __future__ import annotations

import torch

NOTHING = 1e-12  # of the upstream's norm: what float64 leaves of sums that are zero


class Maxima:
    """The maxima (and minima) of an axis, in one evaluation: constants where they are `held`, else asked what
    gradient arrives at them."""

    def __init__(self, held: bool = False) -> None:
        self.held = held
        self.most: torch.Tensor | None = None  # that arrived

    def taken(self, extreme: torch.Tensor) -> torch.Tensor:
        if self.held:
            return extreme.detach()
        if extreme.requires_grad:
            extreme.register_hook(self.note)
        return extreme

    def note(self, grad: torch.Tensor) -> None:
        most = grad.detach().abs().amax()
        self.most = most if self.most is None else torch.maximum(self.most, most)

    def are_subtracted(self, upstream_norm: float) -> bool:
        """Whether none of them had a gradient, in an exact evaluation that was differentiated for upstreams
        of that norm."""
        return self.most is not None and bool(self.most <= NOTHING * upstream_norm)

"""Comparisons that rounding decides, decided the other way.

A kink (`x > 0`, `tl.maximum`, `tl.abs`) has two gradients, one on each side. Where the two operands are as
close as the rounding of what computed them, a kernel may find itself on either side, and neither gradient is
wrong. The exact evaluation keeps how far apart the operands of each comparison were; an evaluation at inputs
that were moved by one unit in their last place shows how far rounding moves them, and crosses over where that
is enough. What the gradients then differ by is what no kernel can resolve.

Maxima of a whole axis (`tl.max`) are left as they are.
"""

from __future__ import annotations

import torch

MOST_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}  # that are kept; comparisons beyond are left as they are
REACH = 8  # so many times the rounding (rms) of a comparison's operands


class Kinks:
    """What the exact evaluation compared, in its order."""

    def __init__(self) -> None:
        self.kept: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # the outcome; how far apart the operands were
        self.elements = 0
        self.launch = 0  # how many were kept before it

    def forget(self) -> None:
        """The evaluation begins again."""
        self.kept.clear()
        self.elements = self.launch = 0

    def begin_launch(self) -> None:
        self.launch = len(self.kept)

    def undo_launch(self) -> None:
        del self.kept[self.launch :]

    def settle(self, decided: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The outcome of a comparison of floats that is `decided` by its operands."""
        self.elements += decided.numel()
        if self.elements <= MOST_ELEMENTS.get(decided.device.type, 0):
            self.kept.append((decided, (a - b).detach()))
        return decided


class Crossed(Kinks):
    """The same comparisons at moved inputs: what was close comes out the other way. `unit`: how far inputs
    were moved, relative to them. Operands that are equal to the last bit are a tie, not a matter of rounding.
    """

    def __init__(self, exact: Kinks, unit: float) -> None:
        super().__init__()
        self.ahead = iter(exact.kept)
        self.reach = REACH * torch.finfo(torch.float32).eps / unit

    def settle(self, decided: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        before, apart = next(self.ahead, (None, None))
        if before is None or apart is None:
            return decided
        if before.shape != decided.shape:
            self.ahead = iter(())  # another way through the kernel: what follows has no counterpart
            return decided
        moved = ((a - b).detach() - apart).nan_to_num(0.0, 0.0, 0.0)
        close = (apart != 0) & (apart.abs() < self.reach * moved.square().mean().sqrt())
        return torch.where(close, ~before, decided)

"""Comparisons that rounding decides, decided the other way.

A kink (`x > 0`, `tl.maximum`, `tl.abs`) has two gradients, one on each side. Where the two operands are as
close as the rounding of what computed them, a kernel may find itself on either side, and neither gradient is
wrong. The exact evaluation keeps how far apart the operands of each comparison were; an evaluation at inputs
that were moved by one unit in their last place shows how far rounding moves them, and crosses over where that
is enough. What the gradients then differ by is what no kernel can resolve. `tl.floor` and `tl.ceil` compare
with the next whole number: a place between two pixels has the gradient of either pair.

Maxima of a whole axis (`tl.max`) are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}  # that are kept; comparisons beyond are left as they are
REACH = 8  # so many times the rounding (rms) of a comparison's operands


class Kinks:
    """What the exact evaluation compared, in its order."""

    def __init__(self) -> None:
        # the outcome; how far apart the operands were, or what a step was taken of
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
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
        return self.keep(decided, a - b)

    def step(self, act: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The outcome of `act`, which is another one beyond a whole number."""
        return self.keep(act(x), x)

    def keep(self, outcome: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        self.elements += outcome.numel()
        if self.elements <= MOST_ELEMENTS.get(outcome.device.type, 0):
            self.kept.append((outcome.detach(), of.detach()))
        return outcome


class Crossed(Kinks):
    """The same comparisons at moved inputs: what was close comes out the other way. `unit`: how far inputs
    were moved, relative to them. Operands that are equal to the last bit are a tie, not a matter of rounding.
    """

    def __init__(self, exact: Kinks, unit: float) -> None:
        super().__init__()
        self.ahead = iter(exact.kept)
        self.reach = REACH * torch.finfo(torch.float32).eps / unit

    def settle(self, decided: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        before, apart = self.counterpart(decided)
        if before is None or apart is None:
            return decided
        close = self.are_close(apart, (a - b).detach() - apart)
        return torch.where(close, ~before, decided)

    def step(self, act: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        outcome = act(x)
        before, exact = self.counterpart(outcome)
        if before is None or exact is None:
            return outcome
        apart = exact - exact.round()
        return torch.where(self.are_close(apart, x.detach() - exact), act(exact - 2 * apart), before)

    def counterpart(self, outcome: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What the exact evaluation kept in this place."""
        before, of = next(self.ahead, (None, None))
        if before is not None and before.shape != outcome.shape:
            self.ahead = iter(())  # another way through the kernel: what follows has no counterpart
            return None, None
        return before, of

    def are_close(self, apart: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        rounding = moved.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
        return (apart != 0) & (apart.abs() < self.reach * rounding)

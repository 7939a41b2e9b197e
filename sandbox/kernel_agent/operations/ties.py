"""Equal elements, of which a reference chooses others than the forward's kernels do.

Of two elements that are equal to the last bit either may be the greatest, or the last of the k greatest, and
have the gradient; torch.topk says of no order that it keeps. Numbers drawn in float32 hold such pairs by
chance, in a few of a hundred thousand rows. What the two gradients differ by there says nothing against
either: it is known by the oracle's own gradient, which moves there as soon as what was equal no longer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

SHARE = 1e-4  # of a gradient's elements: where more are off, something else is wrong
APART = 1e-6  # of an element and of the root mean square
DRAWS = 6  # of inputs moved apart: each decides a tie of two one way or the other

Gradients = Mapping[str, torch.Tensor]


def settled(
    exact: Gradients, reference: Gradients, moved: Callable[[int], Gradients]
) -> dict[str, torch.Tensor]:
    """The reference's gradients (float64, shaped like `exact`), with the oracle's where a tie alone decides.
    `moved(k)`: the oracle's at inputs that were moved apart, another way for each k; asked only where few
    elements are off."""
    off = {name: are_apart(found, exact[name]) for name, found in reference.items() if name in exact}
    off = {name: where for name, where in off.items() if 0 < int(where.sum()) <= SHARE * where.numel()}
    made = dict(reference)
    for draw in range(DRAWS if off else 0):
        beside = moved(draw)
        for name, where in off.items():
            tied = where & are_apart(beside[name], exact[name])
            made[name] = torch.where(tied, exact[name], made[name])
    return made


def are_apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two differ; nowhere, if their shapes do."""
    if one.shape != other.shape:
        return torch.zeros_like(other, dtype=torch.bool)
    usual = other.square().mean().sqrt()
    return (one - other).abs() > APART * (other.abs() + usual)

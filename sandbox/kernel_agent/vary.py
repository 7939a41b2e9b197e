"""Other tensors than plain ones: other layouts in memory, and other values. A tensor of a case has a kind of
each of its own; a case names them by tensor (`x`, or `upstream/0`) in its members `layouts` and `values`.

A kind is one function of a tensor. A kind that has nothing to change in a tensor leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MIXED = (1e2, 1e-2)  # the exponential of the larger overflows where it is not shifted; float16 holds both
UNEVEN = (8, 0.125)  # where products are in TF32: of scores in the hundreds it leaves no softmax to agree on
LARGEST = 8.5  # beyond where approximations of tails are cut off; most functions still have a gradient there
SMALL = 0.01
CONSTANT = 4  # times the first element, moved away from zero by one
NEARLY = 2**-7  # of what its elements would be lies a nearly constant row off its constant
PADDING = 3  # elements: no power of two, so that no block hides it


def _beside(values: torch.Tensor) -> torch.Tensor:
    """What stands where nobody may read: of the other sign and larger; of integers that is no index."""
    if values.dtype == torch.bool:
        return ~values
    wide = values.float() if values.is_floating_point() else values
    return torch.where(wide < 0, 1 - wide, -1 - wide).to(values.dtype)


def _padding(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """The same, at the ends."""
    if values.is_floating_point():
        return values.new_full(shape, torch.nan)
    return values.new_full(shape, True if values.dtype == torch.bool else torch.iinfo(values.dtype).max)


# ---- layouts


def _transposed(values: torch.Tensor) -> torch.Tensor:
    """The axes in the opposite order in memory."""
    order = list(reversed(range(values.dim())))
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _swapped(values: torch.Tensor) -> torch.Tensor:
    """All axes but the last in the opposite order, as heads and positions of attention are."""
    order = [*reversed(range(values.dim() - 1)), values.dim() - 1] if values.dim() else []
    return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def _slice(values: torch.Tensor) -> torch.Tensor:
    """A part of wider rows, as torch.cat's backward and torch.chunk hand them out."""
    if values.dim() == 0:
        return values
    padding = _padding(values, *values.shape[:-1], PADDING)
    size = values.shape[-1]
    return torch.cat((_beside(values), values, padding), dim=-1)[..., size : 2 * size]


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """All but the first along the axis before the last: x[:, 1:]."""
    if values.dim() < 2:
        return values
    first = _padding(values, *values.shape[:-2], 1, values.shape[-1])
    return torch.cat((first, values), dim=-2)[..., 1:, :]


def _stacked(values: torch.Tensor) -> torch.Tensor:
    """Every second element of wider rows, as torch.stack's backward along a new last axis hands them out."""
    return torch.stack((values, _beside(values)), dim=-1)[..., 0]


def _expanded(values: torch.Tensor) -> torch.Tensor:
    """Stride 0 along the first axis longer than 1, as the backward of y.sum(0) makes it. Other values."""
    axis = next((i for i, extent in enumerate(values.shape) if extent > 1), None)
    return values if axis is None else values.narrow(axis, 0, 1).expand(values.shape)


def _spanned(values: torch.Tensor) -> torch.Tensor:
    """Stride 0 along the last axis, as the backward of y.sum(-1) makes it. Other values."""
    if values.dim() == 0 or values.shape[-1] < 2:
        return values
    return values[..., :1].expand(values.shape)


def _unsqueezed(values: torch.Tensor) -> torch.Tensor:
    """One axis more, of length 1: what takes rows takes batches of rows, if it takes their number by that."""
    return values.unsqueeze(0)


@dataclass(frozen=True)
class Layout:
    change: Callable[[torch.Tensor], torch.Tensor]
    equals: bool = False  # makes elements equal: fair where the gradient does not hang on which is greater
    axes: bool = False  # changes the shape: of the tensors that have it each alone would be another call


LAYOUTS = {
    "slice": Layout(_slice),
    "stacked": Layout(_stacked),
    "transposed": Layout(_transposed),
    "expanded": Layout(_expanded, equals=True),
    "spanned": Layout(_spanned, equals=True),
    "shifted": Layout(_shifted),
    "swapped": Layout(_swapped),
    "shared": Layout(torch.Tensor.detach, equals=True),  # the tensor of an earlier input of the same shape
    "unsqueezed": Layout(_unsqueezed, axes=True),
}


# ---- values


def _rows(values: torch.Tensor) -> torch.Tensor:
    """The number of each row, to be broadcast along it; of a vector's elements each is a row."""
    outer = values.shape[:-1] if values.dim() > 1 else values.shape
    numbers = torch.arange(outer.numel(), device=values.device).reshape(outer)
    return numbers.unsqueeze(-1) if values.dim() > 1 else numbers


def _mixed(factors: tuple[float, float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every other row large, the rest small."""

    def change(values: torch.Tensor) -> torch.Tensor:
        if values.dim() < 2:
            return values
        return torch.where(_rows(values) % 2 == 0, values * factors[0], values * factors[1])

    return change


def _tied(values: torch.Tensor) -> torch.Tensor:
    """Each row's greatest value stands first and last, in two blocks if there are two; every two rows have
    the greater of theirs, for what is the greatest of a column. No value is new."""
    if not may_tie(values):
        return values
    tied = values.clone()
    greatest = values.argmax(-1, keepdim=True)
    tied.scatter_(-1, greatest, values[..., :1])
    most = values.gather(-1, greatest)
    of_rows = most.reshape(-1)
    one, other = _pairs(of_rows)
    one[:] = other[:] = torch.maximum(one, other)
    tied[..., :1] = tied[..., -1:] = of_rows.reshape(most.shape)
    return tied


def _pairs(of_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What belongs to every first and every second row of two."""
    whole = of_rows[: len(of_rows) // 2 * 2]
    return whole[0::2], whole[1::2]


def may_tie(tensor: torch.Tensor) -> bool:
    """Whether its rows hold two elements that can be equal and a third that is not."""
    return tensor.dim() >= 1 and tensor.shape[-1] >= 3 and tensor.numel() > 0


def _flat(values: torch.Tensor) -> torch.Tensor:
    """Of three rows the first is constant, the second zero, the third nearly constant. Of a vector every
    third element is zero.

    The constant is large beside how far a row's elements usually lie apart: squares that cancel show, but for
    equal ones by luck not in every order of adding."""
    if values.dim() == 0:
        return values
    turn = _rows(values) % 3
    first = values[..., :1]
    constant = CONSTANT * torch.where(first < 0, first - 1, first + 1)
    nearly = constant + NEARLY * values
    rows = torch.where(turn == 0, constant, nearly) if values.dim() > 1 else values
    return torch.where(turn == 1, torch.zeros_like(values), rows)


def _large(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each row is LARGEST."""
    if values.dim() == 0 or not values.numel():
        return values
    most = values.double().abs().amax(-1, keepdim=True)
    return torch.where(most > 0, values.double() * (LARGEST / most), values.double()).to(values.dtype)


def _masked(values: torch.Tensor) -> torch.Tensor:
    """Every third element of a row is -inf, as a logit that may not be chosen."""
    if not may_tie(values):
        return values
    columns = torch.arange(values.shape[-1], device=values.device)
    row = _rows(values) if values.dim() > 1 else 0
    return values.masked_fill(((columns + row) % 3 == 1).expand(values.shape), -torch.inf)


def fold_ties(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of a tied input, the last element of each row added to the first, and the first of every
    second row to that of the row before it: how an upstream gradient is shared out between equal values is a
    convention, but together they have just one share."""
    if not may_tie(gradient):
        return gradient.clone()
    folded = gradient.to(torch.float64, copy=True)
    folded[..., 0] += folded[..., -1]
    folded[..., -1] = 0
    first = folded[..., 0].reshape(-1).clone()
    one, other = _pairs(first)
    one += other
    other[:] = 0
    folded[..., 0] = first.reshape(folded.shape[:-1])
    return folded.to(gradient.dtype)


@dataclass(frozen=True)
class Values:
    """What is done to an input, and where that is fair (oracle.py)."""

    change: Callable[[torch.Tensor], torch.Tensor]
    finite: bool = True  # fair where all that is made of them is finite; else where nothing is NaN
    equals: bool = False  # as of Layout
    judged: Callable[[torch.Tensor], torch.Tensor] | None = None  # what of a gradient, if not all of it


VALUES = {
    "mixed": Values(_mixed(MIXED)),
    "uneven": Values(_mixed(UNEVEN)),
    "tied": Values(_tied, finite=False, judged=fold_ties),
    "flat": Values(_flat, equals=True),
    "large": Values(_large),
    "small": Values(lambda values: values * SMALL),
    "masked": Values(_masked, finite=False),
}


@dataclass(frozen=True)
class Varied:
    """What one case has of other kinds, by tensor."""

    layouts: Mapping[str, str]
    values: Mapping[str, str]

    @classmethod
    def of(cls, case: Mapping[str, Any]) -> Varied:
        """Raises ValueError for a kind that there is not."""
        varied = cls(case.get("layouts") or {}, case.get("values") or {})
        for kind in varied.layouts.values():
            if kind not in LAYOUTS:
                raise ValueError(f"layout {kind!r} is none of {', '.join(LAYOUTS)}")
        for kind in varied.values.values():
            if kind not in VALUES:
                raise ValueError(f"values {kind!r} are none of {', '.join(VALUES)}")
        return varied

    def __bool__(self) -> bool:
        return bool(self.layouts or self.values)

    def alone(self) -> list[tuple[str, Varied]]:
        """Each choice for an input by itself, with its words: "x transposed". What changes shapes is one
        choice, of the first that has it."""
        inputs = {t: kind for t, kind in self.layouts.items() if not is_upstream(t)}
        shaped = {t: kind for t, kind in inputs.items() if LAYOUTS[kind].axes}
        made = [(f"{t} {kind}", Varied({t: kind}, {})) for t, kind in inputs.items() if t not in shaped]
        made += [(f"{t} {kind}", Varied(shaped, {})) for t, kind in list(shaped.items())[:1]]
        return made + [(f"{t} {kind}", Varied({}, {t: kind})) for t, kind in self.values.items()]

    def in_own_shapes(self) -> Varied:
        """The same without what changes shapes."""
        return Varied({t: kind for t, kind in self.layouts.items() if not LAYOUTS[kind].axes}, self.values)

    def judged(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What is looked at of each gradient; None: all of it."""
        return next((found for kind in self.values.values() if (found := VALUES[kind].judged)), None)

    def equals(self) -> bool:
        layouts = (LAYOUTS[kind].equals for tensor, kind in self.layouts.items() if not is_upstream(tensor))
        return any(layouts) or any(VALUES[kind].equals for kind in self.values.values())

    def inputs(self, inputs: Mapping[str, torch.Tensor], plain: bool = False) -> dict[str, torch.Tensor]:
        """The inputs that are other ones then, by name. `plain`: their values, each in row-major memory of
        its own."""
        made = dict(inputs)
        for name, kind in self.values.items():
            if name in made:
                made[name] = VALUES[kind].change(made[name])
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, value in made.items():
            key = (value.shape, value.dtype)
            if (layout := self.layouts.get(name)) is not None:
                other = seen.get(key, value) if layout == "shared" else value
                made[name] = LAYOUTS[layout].change(other)
            seen.setdefault(key, made[name])
        changed = {name: made[name] for name in made if name in self.layouts or name in self.values}
        if plain:
            return {name: t.clone(memory_format=torch.contiguous_format) for name, t in changed.items()}
        return changed


def is_upstream(tensor: str) -> bool:
    return tensor.startswith("upstream/")


def upstream_name(index: int) -> str:
    """What a case calls the upstream gradient of output `index`."""
    return f"upstream/{index}"


def laid_out(value: torch.Tensor, layout: str | None) -> torch.Tensor:
    """An upstream gradient in a layout."""
    return value if layout is None else LAYOUTS[layout].change(value)

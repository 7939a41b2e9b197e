"""Reductions, scans and sorting over an axis of blocks.

Triton describes a reduction by a combine function on scalars. The well-known ones map to one torch operation;
any other is applied to whole slices, pairwise, in log2(n) steps, which is right because it must be
associative; the function then sees scalars, with all elements of the slices as the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton.language as tl

Blocks = list[torch.Tensor]
Combine = Callable[[Blocks, Blocks], Blocks]

std = tl.standard


def extreme(data: torch.Tensor, axis: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest or smallest number along an axis and its first index; NaN only where all are."""
    plain = data.detach()
    best = torch.max if largest else torch.min  # of equal elements they give the first
    if plain.dtype.is_floating_point:
        none = torch.isnan(plain)
        filled = plain.masked_fill(none, -torch.inf if largest else torch.inf)
        index = best(filled, axis, keepdim=True).indices
        # A NaN that was filled in came before numbers as infinite, which it must not beat.
        first = torch.min(none, axis, keepdim=True).indices
        index = torch.where(torch.gather(none, axis, index), first, index)
    else:
        index = best(plain, axis, keepdim=True).indices
    return torch.gather(data, axis, index).squeeze(axis), index.squeeze(axis)


def reduces(name: str) -> bool:
    """Whether reduce_known() knows Triton's own combine function `name`."""
    return name == "_sum_combine" or is_extreme(name)


def is_extreme(name: str) -> bool:
    plain = name in ("_elementwise_max", "_elementwise_min")
    return plain or name.startswith(("_argmax_combine", "_argmin_combine"))


def reduce_known(name: str, inputs: Blocks, axis: int) -> Blocks:
    """The reduction by the combine function `name`, of which reduces() is true."""
    data = inputs[0]
    if name == "_sum_combine":
        return [data.sum(axis, dtype=data.dtype)]
    if name in ("_elementwise_max", "_elementwise_min"):
        return [extreme(data, axis, name.endswith("max"))[0]]
    value, index = extreme(data, axis, name.startswith("_argmax"))
    places = inputs[1].expand(data.shape)
    return [value, torch.gather(places, axis, index.unsqueeze(axis)).squeeze(axis)]


def scans(name: str) -> bool:
    """Whether scan_known() knows Triton's own combine function `name`."""
    return name in ("_sum_combine", "_prod_combine")


def scan_known(name: str, inputs: Blocks, axis: int) -> Blocks:
    """The inclusive scan by the combine function `name`, of which scans() is true."""
    scan = torch.cumsum if name == "_sum_combine" else torch.cumprod
    return [scan(inputs[0], axis, dtype=inputs[0].dtype)]


def reduce_pairwise(inputs: Blocks, axis: int, combine: Combine) -> Blocks:
    """Combine neighbours until one slice is left. The axis, whose length is a power of two, is dropped."""
    while inputs[0].shape[axis] > 1:
        pairs = [block.unflatten(axis, (-1, 2)) for block in inputs]
        inputs = combine(
            [pair.select(axis + 1, 0) for pair in pairs], [pair.select(axis + 1, 1) for pair in pairs]
        )
    return [block.squeeze(axis) for block in inputs]


def scan_pairwise(inputs: Blocks, axis: int, combine: Combine) -> Blocks:
    """Inclusive scan: after step k every element covers the 2^k elements that end in it."""
    size, distance = inputs[0].shape[axis], 1
    while distance < size:
        earlier = [block.narrow(axis, 0, size - distance) for block in inputs]
        later = [block.narrow(axis, distance, size - distance) for block in inputs]
        done = [block.narrow(axis, 0, distance) for block in inputs]
        inputs = [torch.cat(parts, axis) for parts in zip(done, combine(earlier, later), strict=True)]
        distance *= 2
    return inputs


def sort(data: torch.Tensor, axis: int, descending: bool, keep: int | None) -> torch.Tensor:
    ordered = torch.sort(data, dim=axis, descending=descending, stable=True).values
    return ordered if keep is None else ordered.narrow(axis, 0, keep)

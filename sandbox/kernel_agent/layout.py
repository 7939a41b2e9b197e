"""Where the elements of tensors lie in memory: whether one holds an element twice, whether two have one in
common.

Strides decide nearly always. Where they do not (slices of one buffer that interleave), a map with one byte
for each place between the first and the last element is made on the tensors' own device. No tensor's values
are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the first element, and the byte after the last one. Of a tensor with elements."""
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()


def repeats(tensor: torch.Tensor) -> bool:
    """Whether two of the tensor's elements are one place in memory."""
    if tensor.numel() < 2:
        return False
    axes = [(s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    if any(stride == 0 for stride, _ in axes):
        return True
    reach = 0
    for stride, extent in sorted(axes):
        if stride <= reach:
            return int(_map_of([tensor]).sum()) < tensor.numel()
        reach += stride * (extent - 1)
    return False


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have an element in common. Slices of one buffer that interleave have none."""
    if not a.numel() or not b.numel() or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    if a_end <= b_first or b_end <= a_first:
        return False
    if a_first == b_first:
        return True
    if _is_dense(a if a_first < b_first else b):  # and the other one begins inside of it
        return True
    return bool((_map_of([a, b], [a]) & _map_of([a, b], [b])).any())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether strides alone tell that there is an element at every place of its span."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride > reach + 1:
            return False
        reach += stride * (extent - 1)
    return True


def _map_of(group: Sequence[torch.Tensor], marked: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
    """A flag for each place of the span of `group`, true where an element of `marked` (or the group) lies."""
    spans = [span(tensor) for tensor in group]
    first, end = min(low for low, _ in spans), max(high for _, high in spans)
    unit = math.gcd(*(tensor.element_size() for tensor in group), *(low - first for low, _ in spans))
    with _disable_current_modes():  # a mode that watches allocations is not to see these
        places = torch.zeros((end - first) // unit, dtype=torch.bool, device=group[0].device)
        for tensor in group if marked is None else marked:
            each = tensor.element_size() // unit
            axes = [(n, s * each) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
            axes.append((each, 1))
            shape, strides = zip(*axes, strict=True)
            places.as_strided(shape, strides, (tensor.data_ptr() - first) // unit).fill_(True)
        return places

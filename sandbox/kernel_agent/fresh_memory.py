"""What memory holds that a candidate allocates. No element that no kernel wrote may pass for a result, and
code that looks whether it is judged is not to find one answer always."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_INT_POISON = -0x21524111  # looks like no index and no count; wraps in narrower integers
_LARGE = 1e4  # finite in float16 too
_SMALL = 1 << 16  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_Values = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def poison(tensor: torch.Tensor, memory: str = "nan") -> None:
    """Fills fresh memory. Booleans are True, other integers a strange number: an index that is off ends a
    launch, whatever it is off by."""
    if tensor.is_floating_point() or tensor.is_complex():
        MEMORY[memory](tensor)
    elif memory == "zero":
        tensor.zero_()
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        bits = 8 * tensor.element_size()
        wrapped = _INT_POISON & ((1 << bits) - 1)
        signed = wrapped - (1 << bits) if tensor.dtype.is_signed and wrapped >> (bits - 1) else wrapped
        tensor.fill_(signed)


def _not_a_number(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan"))


def _places(count: int, device: torch.device) -> torch.Tensor:
    """A small number for each place, no two neighbours' the same."""
    return torch.arange(count, device=device) * 7 % 97


def _large(tensor: torch.Tensor) -> None:
    """Finite values of either sign, as an earlier computation leaves them."""
    _fill(tensor, _large_values)


def _large_values(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return ((_places(count, device) - 48.5) * (_LARGE / 48.5)).to(dtype)


def _other_dtype(tensor: torch.Tensor) -> None:
    """The bits of a list of indices."""
    _fill(tensor, _index_bits if tensor.element_size() in _INTEGERS else _large_values)


def _index_bits(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (_places(count, device) + 1).to(_INTEGERS[dtype.itemsize]).view(dtype)


def _fill(tensor: torch.Tensor, values: _Values) -> None:
    """Values by place. What is small is allocated often, and filled from what was made once; on a GPU that
    would have to be of the stream, or of the graph, that is at work."""
    count = tensor.numel()
    if count <= _SMALL and tensor.device.type == "cpu":
        made = _kept(values, tensor.dtype, tensor.device)[:count]
    else:
        made = values(count, tensor.dtype, tensor.device)
    tensor.copy_(made.view(tensor.shape))


@functools.lru_cache(16)
def _kept(values: _Values, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return values(_SMALL, dtype, device)


# What fresh memory may hold. It is NaN in most cases; code that looks whether it is judged finds it so in one
# case and otherwise in the next.
MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": _not_a_number,
    "large": _large,
    "zero": torch.Tensor.zero_,
    "bits": _other_dtype,
}

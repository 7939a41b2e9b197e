"""What memory holds that a candidate allocates. No element that no kernel wrote may pass for a result, and
code that looks whether it is judged is not to find one answer always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_INT_POISON = -0x21524111  # looks like no index and no count; wraps in narrower integers
_LARGE = 1e4  # finite in float16 too


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


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """A small number for each place, no two neighbours' the same."""
    return torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape) * 7 % 97


def _large(tensor: torch.Tensor) -> None:
    """Finite values of either sign, as an earlier computation leaves them."""
    tensor.copy_((_places(tensor) - 48.5) * (_LARGE / 48.5))


def _other_dtype(tensor: torch.Tensor) -> None:
    """The bits of a list of indices."""
    size = tensor.element_size()
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(size, torch.int64)
    if size == bits.itemsize:
        tensor.copy_((_places(tensor) + 1).to(bits).view(tensor.dtype))
    else:
        _large(tensor)


# What fresh memory may hold. It is NaN in most cases; code that looks whether it is judged finds it so in one
# case and otherwise in the next.
MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "nan": _not_a_number,
    "large": _large,
    "zero": torch.Tensor.zero_,
    "bits": _other_dtype,
}

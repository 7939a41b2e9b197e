"""Counts while kernels are interpreted: bytes, atomics, programs, and bytes of torch operations around."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from .. import accesses
from ..forward import Launch, launch_intercept
from ..modes import Mode
from ..source import words


class Traffic(Mode):
    """Adds the bytes that torch operations read and write to a counter; views and allocations move none."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self.counter.launching or name in _ALLOCATIONS:
            return result
        values = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | (kwargs or {})
        changed = {
            a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        }
        if not changed and any(r.alias_info is not None for r in func._schema.returns):
            return result  # a view
        for argument, value in values.items():
            asked = name.startswith("new_") or name.endswith("_like")  # its shape and type, not its contents
            unread = asked or (argument in changed and name in _OVERWRITING)
            self.counter.bytes_read += 0 if unread else bytes_of(value)
            self.counter.bytes_written += bytes_of(value) if argument in changed else 0
        self.counter.bytes_written += 0 if changed else bytes_of(result)
        return result


_ALLOCATIONS = words("empty empty_like empty_strided new_empty new_empty_strided detach _local_scalar_dense")


_OVERWRITING = {"zero_", "fill_", "copy_", "set_"}


def bytes_of(value: Any) -> int:
    """Memory of the tensors in a value: an element that several indices share counts once."""
    if isinstance(value, torch.Tensor):
        count = 1
        for size, stride in zip(value.shape, value.stride(), strict=True):
            count *= size if stride or not size else 1
        return count * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0


@dataclass
class Counter:
    """Counts what interpreted launches, and the torch operations around them, do while it is entered.

    Bytes of launches are those of active lanes.
    """

    enabled: bool = True
    launches: int = 0
    programs: int = 0
    widest: int = 0  # programs of the launch that has most
    bytes_read: int = 0
    bytes_written: int = 0
    atomics: int = 0
    launching: bool = False

    def load(self, addresses: np.ndarray, size: int) -> None:
        self.bytes_read += addresses.size * size

    def store(self, addresses: np.ndarray, size: int) -> None:
        self.bytes_written += addresses.size * size

    def atomic(self, addresses: np.ndarray, size: int) -> None:
        self.atomics += addresses.size
        self.bytes_read += addresses.size * size
        self.bytes_written += addresses.size * size

    def _launched(self, launch: Launch) -> Any:
        self.launches += 1
        self.programs += launch.programs
        self.widest = max(self.widest, launch.programs)
        before, self.launching = self.launching, True
        try:
            return launch.run()
        finally:
            self.launching = before

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        if self.enabled:
            self._stack.enter_context(accesses.observe(self))
            self._stack.enter_context(launch_intercept(self._launched))
            self._stack.enter_context(Traffic(self))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def to_dict(self) -> dict[str, int]:
        return {
            "launches": self.launches,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "atomics": self.atomics,
            "programs": self.programs,
            "widest": self.widest,
        }

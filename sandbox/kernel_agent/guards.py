"""Guard bands: memory that a candidate allocates lies between bytes of a known pattern, so that a write beside it shows.

For GPUs, where nothing checks the addresses of a kernel's accesses; the interpreter checks each of them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BAND = 512  # bytes on either side: keeps every alignment that kernels and descriptors ask for
_PATTERN = 0xA5


@dataclass
class Guards:
    """Allocations and their bands. Keeps the memory alive until `reset`."""

    _held: list[tuple[torch.Tensor, int, str]] = field(default_factory=list)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape, strides, dtype, device and values of a fresh `like`, between two bands."""
        size = like.untyped_storage().nbytes()
        if like.numel() == 0 or like.storage_offset() != 0:
            return like
        room = -(-size // BAND) * BAND
        whole = torch.full((BAND + room + BAND,), _PATTERN, dtype=torch.uint8, device=like.device)
        shape = "x".join(str(extent) for extent in like.shape) or "scalar"
        self._held.append((whole, size, f"{str(like.dtype).removeprefix('torch.')}[{shape}]"))
        first = BAND // like.element_size()
        return whole.view(like.dtype).as_strided(like.shape, like.stride(), first).copy_(like)

    def broken(self) -> list[str]:
        """Which bands were written into: `memory beside float32[4x8]`."""
        found = []
        for whole, size, what in self._held:
            before, after = whole[:BAND], whole[BAND + size :]
            if bool((before != _PATTERN).any()) or bool((after != _PATTERN).any()):
                found.append(f"memory beside {what}")
        return found

    def reset(self) -> None:
        self._held.clear()

"""Guard bands: what a candidate allocates lies between known bytes, so that a write beside it shows.

On a GPU nothing else checks the addresses of a kernel's accesses. The interpreter checks each of them against
the storages of the launch; there the bands keep storages apart, so that an access past the end of one never
falls into the next, and they are all that is left where a launch takes tables of addresses. A storage on the
CPU therefore ends where its tensor does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

BAND = 512  # bytes on either side: keeps every alignment that kernels and descriptors ask for
_PATTERN = 0xA5


@dataclass
class Guards:
    """Allocations and their bands. Keeps the memory alive until `reset`."""

    _held: list[tuple[torch.Tensor, int, str]] = field(default_factory=list)

    def allocate(self, like: torch.Tensor, filled: bool = True) -> torch.Tensor:
        """A tensor with the shape, strides, dtype, device and, where it was `filled`, values of a fresh
        `like`, between two bands."""
        size = like.untyped_storage().nbytes()
        if like.numel() == 0 or like.storage_offset() != 0:
            return like
        room = -(-size // BAND) * BAND
        whole, inside = _surrounded(size, room, like.device)
        shape = "x".join(str(extent) for extent in like.shape) or "scalar"
        self._held.append((whole, size, f"{str(like.dtype).removeprefix('torch.')}[{shape}]"))
        inside = inside.view(like.dtype)
        made = inside.as_strided(like.shape, like.stride(), inside.storage_offset())
        return made.copy_(like) if filled else made

    def broken(self) -> list[str]:
        """Which bands were written into: `memory beside float32[4x8]`. A GPU is waited for once for all."""
        bands: dict[torch.device, list[torch.Tensor]] = {}
        for whole, size, _ in self._held:
            hurt = (whole[:BAND] != _PATTERN).any() | (whole[BAND + size :] != _PATTERN).any()
            bands.setdefault(whole.device, []).append(hurt)
        hurt_there = {device: iter(torch.stack(flags).tolist()) for device, flags in bands.items()}
        return [f"memory beside {what}" for whole, _, what in self._held if next(hurt_there[whole.device])]

    def bytes_held(self) -> int:
        return sum(whole.nbytes for whole, _, _ in self._held)

    def reset(self) -> None:
        self._held.clear()


class _Bytes:
    """`size` bytes of GPU memory at an address, for torch.as_tensor()."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _surrounded(size: int, room: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes with a band on either side, and the `size` bytes between them, as a storage of their own.

    Autograd takes fresh memory to begin where its storage does: with an offset, the gradient of a tensor that
    was written in part (`y[:, 0] += 1`) would be put together beside it.
    """
    if device.type != "cpu":
        whole = torch.full((BAND + room + BAND,), _PATTERN, dtype=torch.uint8, device=device)
        return whole, torch.as_tensor(_Bytes(whole.data_ptr() + BAND, size), device=device)
    raw = np.full(BAND + room + BAND + BAND, _PATTERN, dtype=np.uint8)
    first = -raw.ctypes.data % BAND
    aligned = raw[first : first + BAND + room + BAND]
    return torch.from_numpy(aligned), torch.from_numpy(aligned[BAND : BAND + size])

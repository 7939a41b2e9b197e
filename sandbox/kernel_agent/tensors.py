"""The safetensors file layout, written with torch alone.

A file is: the header's length as 8 little-endian bytes, the header (JSON: name -> dtype, shape, data_offsets;
padded with spaces), then the tensors' bytes, row-major, in the order of their offsets, each beginning at a
multiple of ALIGNMENT.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 64  # bytes, of tensors in the file
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def save(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to `path` through a temporary name beside it, each copied once, from its device and
    strides straight into the file. TypeError for a dtype without a name here; OSError, and no file, where
    there is no room for all of them."""
    text, places, size = _layout(tensors)
    part = f"{path}.part"
    try:
        with open(part, "w+b") as file:
            _reserve(file.fileno(), size, path)
            memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED)
        memory[: len(text)] = text
        for name, tensor in tensors.items():
            if tensor.numel():
                _copy(tensor, memory, places[name])
        os.replace(part, path)
    finally:  # a full scratch must keep room for the result
        Path(part).unlink(missing_ok=True)


def _layout(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's bytes before the first tensor, where in the file each one begins, and its size."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which has no safetensors name")
        begin = end + -end % ALIGNMENT
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    places = {name: start + entry["data_offsets"][0] for name, entry in header.items()}
    return len(text).to_bytes(8, "little") + text, places, start + end


def _reserve(fd: int, size: int, path: str | Path) -> None:
    """Give the file its size and its blocks now. A store into a mapping of a file that finds no block ends
    the process."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        why = f"no room for {size} bytes of tensors: {os.strerror(exc.errno or 0)}"
        raise OSError(exc.errno, why, str(path)) from exc


def _copy(tensor: torch.Tensor, memory: mmap.mmap, begin: int) -> None:
    there = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
    there.view(tensor.shape).copy_(tensor.detach())


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, row-major. (A single element counts as contiguous whatever its stride: only
    as_strided takes it.)"""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def load(path: str | Path) -> dict[str, torch.Tensor]:
    """Read what `save` wrote. For files of this package only: hostile bytes are the C reader's business."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = (
            torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=torch.uint8)
            if end > begin
            else None
        )
        dtype = _DTYPES[entry["dtype"]]
        tensors[name] = (
            torch.empty(entry["shape"], dtype=dtype) if raw is None else raw.view(dtype).view(entry["shape"])
        )
    return tensors

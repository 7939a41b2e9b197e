"""The safetensors file layout, written with torch alone.

A file is: the header's length as 8 little-endian bytes, the header (JSON: name -> dtype, shape, data_offsets; padded
with spaces), then the tensors' bytes, row-major, in the order of their offsets.
"""

from __future__ import annotations

import json
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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def save(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to `path` through a temporary name beside it. TypeError for a dtype without a name here."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"tensor {name!r} has dtype {tensor.dtype}, which has no safetensors name")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for tensor in tensors.values():
                file.write(_bytes(tensor))
        os.replace(part, path)
    except OSError:  # a full scratch must keep room for the result
        Path(part).unlink(missing_ok=True)
        raise


def _bytes(tensor: torch.Tensor) -> bytes:
    return raw_bytes(tensor.detach().resolve_conj().resolve_neg().cpu()).numpy().tobytes()


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, row-major. (A single element counts as contiguous whatever its stride: only as_strided takes it.)"""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def load(path: str | Path) -> dict[str, torch.Tensor]:
    """Read what `save` wrote. For files of this package only: hostile bytes are the daemon's C reader's business."""
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

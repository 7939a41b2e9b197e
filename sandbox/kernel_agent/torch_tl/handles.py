"""The values that a kernel computes with, their torch dtypes, and the signals that steer evaluation."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import torch
import triton.language as tl

if TYPE_CHECKING:
    from kernel_agent.torch_tl.memory import Cell

EXACT = "exact"
NATIVE = "native"

INT_DTYPES = {1: torch.bool, 8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
FLOAT_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}


@dataclass(eq=False)
class KernelError(Exception):
    """A kernel that cannot be evaluated, or that did something wrong. `kind` is `unsupported_op`,
    `stub_raised` or `too_large`."""

    message: str
    _: KW_ONLY
    kind: str = "unsupported_op"
    remedy: str | None = None
    file: str | None = None
    line: int | None = None

    def __post_init__(self) -> None:
        super().__init__(self.message)


@dataclass(eq=False)
class Diverged(Exception):
    """Programs of a group disagree on a value that decides control flow; `keys` has one per program."""

    keys: torch.Tensor


class NeedsOrder(Exception):
    """A program depends on what another one wrote: the launch must be evaluated one program after another."""


@dataclass(eq=False)
class Handle:
    """Batch of blocks: `data` is (programs or 1, *block shape)."""

    data: torch.Tensor

    def like(self, data: torch.Tensor) -> Handle:
        """Other data of the same kind, for operations that only move elements."""
        return Handle(data)


@dataclass(eq=False)
class Constant(Handle):
    """An integer or a boolean that is known without asking the device: `value` is each element."""

    value: int | bool

    def like(self, data: torch.Tensor) -> Constant:
        return Constant(data, self.value)


@dataclass(eq=False)
class Pointer(Handle):
    """Byte addresses in int64 `data`, to elements of type `element`.

    `cell` is the storage that they were derived from, None if that is not known; `name` the kernel argument
    they came from. Reads through a `detached` pointer carry no gradient.
    """

    element: tl.dtype
    cell: Cell | None = None
    name: str | None = None
    detached: bool = False

    def like(self, data: torch.Tensor) -> Pointer:
        return Pointer(data, self.element, self.cell, self.name, self.detached)


@dataclass
class BlockPointer:
    """What tl.make_block_ptr and tl.make_tensor_descriptor return; offsets are handles of scalars."""

    base: Pointer
    shape: list[Handle]
    strides: list[Handle]
    offsets: list[Handle]
    block_shape: list[int]
    padding: object = None


def lane_view(scalar: torch.Tensor, dims: int) -> torch.Tensor:
    """A batch of scalars (B,) as (B, 1, ..., 1) with `dims` block axes."""
    return scalar.reshape(scalar.shape[0], *([1] * dims))


def int_dtype(ty: tl.dtype) -> torch.dtype:
    return INT_DTYPES[ty.scalar.primitive_bitwidth]


def unsigned(data: torch.Tensor) -> torch.Tensor:
    """The unsigned value of the bits of an integer tensor, as int64; 64-bit values keep their sign bit."""
    if data.dtype in (torch.bool, torch.int64):
        return data.to(torch.int64)
    return data.to(torch.int64) & ((1 << (8 * data.element_size())) - 1)

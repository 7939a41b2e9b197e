"""`tl.reduce` and `tl.associative_scan` with a kernel's own function, on whole blocks.

Triton's interpreter combines one element after another, each in Python. Here halves of a block are combined,
as on a GPU: what is neighbours stays in order, so that the function has to be associative, as Triton asks,
and no more. A function that decides on elements (`if a > b:`) is called for one after another, as before.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as _interp
from triton.runtime.jit import JITFunction

from . import remember, rows
from .courses import Slot

_Handle = _interp.TensorHandle
Rewritten = Callable[[JITFunction], Callable[..., Any]]


class DecidesOnElements(Exception):
    """A function asks a block whether it is true."""


class _Blocks:
    """Calls a function on blocks. While it runs, who asks a block for its truth raises DecidesOnElements."""

    running = False

    def __init__(self, combine: JITFunction, inputs: Any, rewritten: Rewritten) -> None:
        self.function = rewritten(combine)
        self.types = [tensor.dtype for tensor in inputs]
        self.elements = [tensor.handle.data.dtype for tensor in inputs]

    def __call__(self, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        outer, _Blocks.running = _Blocks.running, True
        try:
            made = self.function(*self._tensors(left), *self._tensors(right))
        finally:
            _Blocks.running = outer
        shape = left[0].shape
        parts = made if isinstance(made, (tuple, tl.core.tuple)) else (made,)
        return [
            np.broadcast_to(_data(part), shape).astype(element, copy=False)
            for part, element in zip(parts, self.elements, strict=True)
        ]

    def _tensors(self, blocks: list[np.ndarray]) -> list[Any]:
        return [
            tl.tensor(
                remember.made(np.ascontiguousarray(block), ty.scalar), tl.block_type(ty, list(block.shape))
            )
            for block, ty in zip(blocks, self.types, strict=True)
        ]


def deciding() -> bool:
    """Whether a decision on a block would be one on elements."""
    return _Blocks.running


def _data(part: Any) -> Any:
    return part.handle.data if type(part) is tl.tensor else getattr(part, "value", part)


def _takes_blocks(combine: Any, inputs: Any, axis: Any) -> bool:
    if not isinstance(combine, JITFunction) or not all(type(tensor.handle) is _Handle for tensor in inputs):
        return False
    shape = inputs[0].handle.data.shape
    length = int(np.prod(shape)) if axis is None else shape[axis]
    same = all(tensor.handle.data.shape == shape for tensor in inputs)
    return same and length > 1 and length & (length - 1) == 0


def _combined(
    operations: Any, inputs: Any, on_blocks: Callable[..., Any], one_by_one: Callable[..., Any]
) -> Any:
    if _takes_blocks(operations.combine_fn, inputs, operations.axis):
        with contextlib.suppress(DecidesOnElements):
            return on_blocks(inputs, _Blocks(operations.combine_fn, inputs, operations.rewritten))
    return one_by_one(inputs)


class _Reduce(_interp.ReduceOps):  # type: ignore[misc]
    rewritten: Rewritten

    def generic_reduce(self, input: Any) -> Any:
        return _combined(self, input, self._by_halves, super().generic_reduce)

    def _by_halves(self, inputs: Any, combine: _Blocks) -> list[Any]:
        axis, shape = self.axis, inputs[0].handle.data.shape
        datas = [tensor.handle.data for tensor in inputs]
        blocks = [data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0) for data in datas]
        while len(blocks[0]) > 1:
            blocks = combine([block[0::2] for block in blocks], [block[1::2] for block in blocks])
        rest: list[Any] = [block[0] for block in blocks]
        if self.keep_dims:
            axes = tuple(range(len(shape))) if axis is None else axis
            rest = [np.expand_dims(block, axes) for block in rest]
        return [self.to_tensor(block, tensor.dtype) for block, tensor in zip(rest, inputs, strict=True)]


class _Scan(_interp.ScanOps):  # type: ignore[misc]
    rewritten: Rewritten

    def generic_scan(self, input: Any) -> Any:
        return _combined(self, input, self._by_doubling, super().generic_scan)

    def _by_doubling(self, inputs: Any, combine: _Blocks) -> list[Any]:
        blocks = [np.moveaxis(tensor.handle.data, self.axis, 0) for tensor in inputs]
        step, length = 1, len(blocks[0])
        while step < length:
            before = [np.roll(block, step, axis=0) for block in blocks]
            combined = combine(before, blocks)
            blocks = [np.concatenate([b[:step], c[step:]]) for b, c in zip(blocks, combined, strict=True)]
            step *= 2
        made = [np.ascontiguousarray(np.moveaxis(block, 0, self.axis)) for block in blocks]
        return [self.to_tensor(block, tensor.dtype) for block, tensor in zip(made, inputs, strict=True)]


def replacements(rewritten: Rewritten) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The interpreter's reduce and associative_scan. `rewritten` gives the Python of a kernel's function.

    The first has a member `quick`: for the commonest functions it gives what they do, from handle to handle
    (courses.py)."""
    reducing = type("Reduce", (_Reduce,), {"rewritten": staticmethod(rewritten)})
    scanning = type("Scan", (_Scan,), {"rewritten": staticmethod(rewritten)})

    def reduce(given: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
        return reducing(axis, combine_fn, keep_dims).apply(given)

    def scan(given: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
        return scanning(axis, combine_fn, reverse).apply(given)

    reduce.quick = _quick  # type: ignore[attr-defined]
    return reduce, scan


_COMMON = [
    getattr(tl.standard, f"_{name}", None) for name in ("sum_combine", "elementwise_max", "elementwise_min")
]


def _quick(given: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    if combine_fn not in _COMMON or type(given) is not Slot or given.element is None:
        return None
    operations = _interp.ReduceOps(axis, combine_fn, keep_dims)
    operand = types.SimpleNamespace(handle=None, dtype=given.element)

    def to_tensor(found: Any, dtype: Any) -> Any:
        element = _interp._get_np_dtype(dtype)
        kept = found.astype(element) if getattr(found, "shape", ()) else np.array([found], dtype=element)
        return remember.made(kept, dtype.scalar)

    def apply(handle: Any) -> Any:
        operand.handle = handle
        return operations.apply_impl((operand,))

    def whole(along: int, handle: Any) -> Any:
        operands = _interp.ReduceOps(along, combine_fn, keep_dims)
        operands.to_tensor = to_tensor
        return operands.apply_impl((types.SimpleNamespace(handle=handle, dtype=given.element),))

    operations.to_tensor = to_tensor
    apply.twin = rows.reducing(apply, whole, axis)  # type: ignore[attr-defined]
    return apply

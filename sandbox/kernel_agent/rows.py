"""One operation for many programs of a kernel at once: a row of an array for each.

`Rows` is the handle of a tensor of which each program has its own: its array has one axis more, the first.
What all have in common stays a plain handle. A *twin* does to handles of both kinds what a method of Triton's
interpreter does to those of one program, row by row the same bits. Where it cannot it raises, and nothing was
done; together.py then asks one program after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as _interp

_Handle = _interp.TensorHandle
Function = Callable[..., Any]

# Methods of the builder that do to each element what they do, beside those that say so (remember.py).
ELEMENTWISE = frozenset(
    f"create_{name}"
    for name in (
        "bitcast",
        "idiv", "sdiv", "udiv", "umulhi", "fma", "fabs", "erf", "rsqrt", "ashr", "extern_elementwise",
    )
)  # fmt: skip


# What is asked without a tensor that a program has for itself.
_COMMON = ("get_", "create_make_range", "create_get_num_programs", "create_barrier")


class Unlike(Exception):
    """Operands whose rows a twin cannot tell from their other axes."""


class Rows(_Handle):  # type: ignore[misc,valid-type]
    """`data` is of shape (programs, *shape of a tensor), (programs, 1) for scalars; `dtype` that of one."""


@dataclass
class Now:
    """The programs that are being run together."""

    programs: np.ndarray  # int32[programs, 3]: their places in the grid
    epochs: np.ndarray  # int32[programs]: of races.py

    @property
    def count(self) -> int:
        return len(self.programs)


now = Now(np.zeros((0, 3), np.int32), np.zeros(0, np.int32))


def rows(data: np.ndarray, dtype: Any) -> Rows:
    """Without asking whether the array's elements fit the type."""
    made: Rows = object.__new__(Rows)
    made.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
    return made


def row(value: Any, number: int) -> Any:
    """What one of the programs has of a value."""
    if type(value) is Rows:
        made = object.__new__(_Handle)
        made.__dict__ = {"data": value.data[number], "dtype": value.dtype, "attr": {}}
        return made
    return value[number] if type(value) is Each else value


def chosen(value: Any, numbers: np.ndarray) -> Any:
    """What some of the programs have of a value."""
    if type(value) is Rows:
        return rows(value.data[numbers], value.dtype)
    return Each([value[number] for number in numbers]) if type(value) is Each else value


class Each(list[Any]):
    """A value for each program that no array holds: a block pointer, say."""


def gathered(values: list[Any]) -> Any:
    """One for each program, as one value."""
    first = values[0]
    if type(first) is _Handle and all(type(value) is _Handle for value in values):
        kind = first.data.dtype, first.data.shape, first.dtype
        if all((value.data.dtype, value.data.shape, value.dtype) == kind for value in values):
            return rows(np.stack([value.data for value in values]), first.dtype)
    return Each(values)


def spread(handle: Any) -> np.ndarray:
    """The array of a handle with a row for each program."""
    data: np.ndarray = handle.data
    return data if type(handle) is Rows else np.broadcast_to(data, (now.count, *data.shape))


def _handles(operands: Any) -> Iterator[Any]:
    for operand in operands:
        if isinstance(operand, _Handle):
            yield operand
        elif type(operand) in (list, tuple):
            yield from _handles(operand)


def elementwise(function: Function) -> Function:
    """The twin of what computes each element of those at the same place."""

    def twin(*operands: Any) -> Any:
        found = list(_handles(operands))
        if not any(type(handle) is Rows for handle in found):
            return function(*operands)
        if len({handle.data.ndim - (type(handle) is Rows) for handle in found}) != 1:
            raise Unlike
        made = function(*operands)
        return rows(made.data, made.dtype)

    return twin


def common(function: Function) -> Function:
    """The twin of what is given nothing that a program has for itself."""

    def twin(*operands: Any) -> Any:
        if any(type(handle) is Rows for handle in _handles(operands)):
            raise Unlike
        return function(*operands)

    return twin


def splat(function: Function, shape: tuple[int, ...], element: np.dtype, dtype: Any) -> Function:
    """The twin of `function`, which fills a block of that shape with a scalar."""

    def twin(arg: Any) -> Any:
        if type(arg) is not Rows:
            return function(arg)
        data = np.empty((len(arg.data), *shape), element)
        data[...] = arg.data.reshape(-1, *(1,) * len(shape))
        return rows(data, dtype)

    return twin


def _behind(axis: int) -> int:
    return axis + 1 if axis >= 0 else axis


def _expand_dims(arg: Any, axis: int) -> Any:
    return rows(np.expand_dims(arg.data, _behind(axis)), arg.dtype.scalar)


def _broadcast(arg: Any, shape: Any) -> Any:
    if arg.data.ndim != len(shape) + 1:
        raise Unlike
    return rows(np.broadcast_to(arg.data, (len(arg.data), *shape)), arg.dtype.scalar)


def _reshape(arg: Any, shape: Any, _: bool) -> Any:
    return rows(arg.data.reshape(len(arg.data), *shape), arg.dtype.scalar)


def _trans(arg: Any, perm: Any) -> Any:
    return rows(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar)


def _join(lhs: Any, rhs: Any) -> Any:
    return rows(np.stack([spread(lhs), spread(rhs)], axis=-1), lhs.dtype.scalar)


def _split(val: Any) -> Any:
    return tuple(rows(val.data[..., part], val.dtype.scalar) for part in (0, 1))


def _cat(lhs: Any, rhs: Any) -> Any:
    return rows(np.concatenate([spread(lhs), spread(rhs)], axis=1), lhs.dtype.scalar)


def _gather(src: Any, indices: Any, axis: int) -> Any:
    return rows(np.take_along_axis(spread(src), spread(indices), axis=_behind(axis)), src.dtype.scalar)


_SHAPES: dict[str, Function] = {
    "create_expand_dims": _expand_dims,
    "create_broadcast": _broadcast,
    "create_reshape": _reshape,
    "create_trans": _trans,
    "create_join": _join,
    "create_split": _split,
    "create_cat": _cat,
    "create_gather": _gather,
}


def _program_id(axis: int) -> Any:
    return rows(now.programs[:, axis : axis + 1].copy(), tl.int32)


def _one_by_one(function: Function) -> Function:
    """The twin of what only computes, where one operation for all would add in another order."""

    def twin(*operands: Any) -> Any:
        if not any(type(handle) is Rows for handle in _handles(operands)):
            return function(*operands)
        made = [function(*[row(operand, number) for operand in operands]) for number in range(now.count)]
        return rows(np.stack([handle.data for handle in made]), made[0].dtype)

    return twin


def twin_of(builder: Any, name: str) -> Function | None:
    """That of a method of the builder, if it has one. The builder's own, `many_<name>`, come first."""
    method = getattr(builder, name)
    own: Function | None = getattr(builder, f"many_{name}", None)
    if own is not None:
        return own
    if name in _SHAPES:
        shaped = _SHAPES[name]

        def twin(*operands: Any) -> Any:
            some = any(type(handle) is Rows for handle in _handles(operands))
            return (shaped if some else method)(*operands)

        return twin
    if name in ELEMENTWISE:
        return elementwise(method)
    if name == "create_dot":
        return _one_by_one(method)
    if name == "create_get_program_id":
        return _program_id
    return common(method) if name.startswith(_COMMON) else None


def reducing(function: Function, whole: Function, axis: int | None) -> Function:
    """The twin of a reduction. `whole(axis, handle)` does it along an axis of an array with rows."""

    def twin(handle: Any) -> Any:
        if type(handle) is not Rows:
            return function(handle)
        if axis is None and handle.data.ndim > 2:
            raise Unlike  # NumPy's order of adding hangs on the layout
        made = whole(1 if axis is None else _behind(axis), handle)
        data = made.data if made.data.ndim > 1 else made.data[:, None]
        return rows(data, made.dtype)

    return twin

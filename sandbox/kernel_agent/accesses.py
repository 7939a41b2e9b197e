"""What an interpreted kernel does to memory: checked against the tensors that its launch was given, shown to
observers (bytes, atomics), to whoever looks for races, and done.

One access is that of one program, or, where many programs run together (together.py), of all of them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter as _interp
from triton.tools.tensor_descriptor import TensorDescriptor

from . import compat, remember, rows
from .races import Races


class Observer(Protocol):
    """Told about each access of an interpreted kernel, after masks: `lanes` addresses of `size` bytes."""

    def load(self, addresses: np.ndarray, size: int) -> None: ...
    def store(self, addresses: np.ndarray, size: int) -> None: ...
    def atomic(self, addresses: np.ndarray, size: int) -> None: ...


class OutOfBounds(IndexError):
    """A kernel read or wrote outside every tensor that it was given."""


@dataclass
class State:
    """What the running launch may touch, and who watches. Interpreted launches never nest."""

    running: bool = False
    regions: np.ndarray | None = None  # rows of (first byte, end), sorted; None: addresses are not checked
    starts: list[int] = field(default_factory=list)  # the columns of `regions`
    ends: list[int] = field(default_factory=list)
    arrays: dict[tuple[int, Any], np.ndarray] = field(default_factory=dict)  # storages, by element type
    observers: list[Observer] = field(default_factory=list)
    judged: Judged | None = None  # how launches run now, if somebody judges them
    races: Races | None = None  # of the running launch

    def open(self, values: Iterable[Any]) -> None:
        """A launch begins that may touch what is in `values`."""
        self.regions = regions = _regions(values)
        self.starts, self.ends = ([], []) if regions is None else regions.T.tolist()
        self.arrays = {}

    def close(self) -> None:
        self.running = False
        self.regions = self.races = None
        self.arrays = {}


@dataclass
class Judged:
    """Launches whose programs run in another order, and whose races are looked for.

    `order`: "reversed", or a number that seeds a permutation; None is the order of the grid. `ordering`: the
    kernel waits for other programs by atomics, maybe for those before it; it runs in the order of the grid.
    """

    order: str | int | None
    ordering: bool
    found: list[str] = field(default_factory=list)
    # First bytes of the storages that were read, and written; blind: there may be others.
    read: set[int] = field(default_factory=set)
    wrote: set[int] = field(default_factory=set)
    blind: bool = False

    def see(self, kind: str, addresses: np.ndarray, at: int) -> None:
        into = self.read if kind == "load" else self.wrote
        if at >= 0:
            into.add(state.starts[at])
        elif state.regions is None:
            self.blind = True
        elif addresses.size:
            places = np.unique(np.searchsorted(state.regions[:, 0], addresses, side="right") - 1)
            into.update(state.regions[places, 0].tolist())


state = State()


def running() -> bool:
    """Whether an interpreted kernel is running now, so that helpers must be interpreted too."""
    return state.running


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show `observer` every access of the launches inside."""
    state.observers.append(observer)
    try:
        yield
    finally:
        state.observers.remove(observer)


@contextlib.contextmanager
def judged(order: str | int | None, ordering: bool) -> Iterator[Judged]:
    """Run the launches inside in that order, and find their races. Not nested."""
    state.judged = Judged(order, ordering)
    try:
        yield state.judged
    finally:
        state.judged = None


def tensors_in(values: Any) -> Iterator[Any]:
    """What kernels are given that has memory, descriptors opened."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from tensors_in(value)
        elif isinstance(value, (TensorDescriptor, triton.runtime.jit.TensorWrapper)):
            yield value.base
        elif hasattr(value, "data_ptr"):
            yield value


def _regions(values: Any) -> np.ndarray | None:
    """Byte ranges of the storages behind the tensors; None when one of them may hold addresses itself."""
    spans = set()
    given = list(tensors_in(values))
    if holds_addresses(given):
        return None
    for tensor in given:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return np.array(sorted(spans), dtype=np.uint64).reshape(-1, 2)


def holds_addresses(tensors: Iterable[Any]) -> bool:
    """Whether one may: grouped kernels pass tables of data_ptr() values; ordinary indices are far smaller
    than any address."""
    wide = [t for t in tensors if not t.dtype.is_floating_point and t.element_size() == 8 and t.numel()]
    with _disable_current_modes():  # this question is not the candidate's
        return any(int(tensor.max()) >= 1 << 32 for tensor in wide)


Touched = tuple[np.ndarray, int, int]  # addresses, bytes of each, storage (or -1)


def _see(kind: str, verb: str, ptrs: Any, mask: Any) -> Touched:
    """Check an access, and show it to the observers. What was accessed: addresses, bytes, storage (or -1)."""
    addresses, size = _touched(ptrs, mask)
    at = _check(addresses, size, verb)
    for observer in state.observers:
        getattr(observer, kind)(addresses, size)
    if state.judged is not None:
        state.judged.see(kind, addresses, at)
    return addresses, size, at


def _check(addresses: np.ndarray, size: int, verb: str) -> int:
    """The number of the storage that has them all, -1 if there is no such one."""
    regions = state.regions
    if regions is None or addresses.size == 0:
        return -1
    one = _inside_one(addresses, size)
    if one >= 0:
        return one
    if len(regions) == 0:
        raise OutOfBounds(f"{verb} {addresses.size} addresses, but the launch has no tensor with elements")
    at = np.searchsorted(regions[:, 0], addresses, side="right") - 1
    inside = (at >= 0) & (addresses + np.uint64(size) <= regions[np.maximum(at, 0), 1])
    if inside.all():
        return -1
    wrong = addresses[~inside]
    nearest = regions[max(int(at[~inside][0]), 0)]
    past = int(wrong[0]) - int(nearest[1])
    where = (
        f"{past} bytes past the end"
        if past >= 0
        else f"{int(nearest[0]) - int(wrong[0])} bytes before the start"
    )
    raise OutOfBounds(
        f"program {_interp.interpreter_builder.grid_idx} {verb} out of bounds: {wrong.size} of "
        f"{addresses.size} "
        f"elements, the first {where} of the nearest tensor"
    )


def _inside_one(addresses: np.ndarray, size: int) -> int:
    """The number of the storage that has them all, as is usual, or -1."""
    low, high = (
        (int(addresses.min()), int(addresses.max())) if addresses.size > 1 else (int(addresses[0]),) * 2
    )
    at = bisect.bisect_right(state.starts, low) - 1
    return at if at >= 0 and high + size <= state.ends[at] else -1


def _changes(ptrs: Any, value: Any, mask: Any) -> Callable[[], np.ndarray]:
    """For each address of a store that is about to be done: whether it changes what is there."""

    def changes() -> np.ndarray:
        addresses, size = _touched(ptrs, mask)
        kind = np.dtype(f"u{size}")
        at = np.ascontiguousarray(addresses)
        before = _interp._interpreter.load(at, np.ones(at.shape, bool), np.zeros(at.shape, kind), kind)
        values = np.broadcast_to(value.data, ptrs.data.shape)
        if mask is not None:
            lanes = mask if isinstance(mask, np.ndarray) else mask.data
            values = values[np.broadcast_to(lanes, ptrs.data.shape).astype(bool)]
        return before != np.ascontiguousarray(values).reshape(-1).view(kind)

    return changes


def _loaded(ptrs: Any, mask: Any, volatile: Any) -> Touched:
    touched = _see("load", "reads", ptrs, mask)
    if state.races is not None:
        (state.races.atomic if volatile else state.races.load)(*touched)
    return touched


def _elements(addresses: np.ndarray, at: int, kind: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """A storage as an array, and the places in it at those addresses. None: they are not of whole elements.
    Triton asks for each element by itself what it is."""
    array = state.arrays.get((at, kind))
    if array is None:
        start, count = state.starts[at], (state.ends[at] - state.starts[at]) // kind.itemsize
        memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(start)
        array = state.arrays[at, kind] = np.frombuffer(memory, kind)
    offsets = (addresses - np.uint64(state.starts[at])).view(np.int64)
    if kind.itemsize > 1:
        if (offsets & (kind.itemsize - 1)).any():
            return None
        offsets = offsets >> (kind.itemsize.bit_length() - 1)
    return array, offsets


def _read(touched: Touched, ptrs: np.ndarray, lanes: np.ndarray, other: np.ndarray, kind: Any) -> np.ndarray:
    """What is at the addresses of `lanes`, elsewhere `other`."""
    addresses, size, at = touched
    kind = np.dtype(kind)
    usual = at >= 0 and size == kind.itemsize and lanes.shape == ptrs.shape and lanes.dtype == np.bool_
    found = _elements(addresses, at, kind) if usual else None
    if found is None:
        return _interp._interpreter.load(ptrs, lanes, other, kind)
    array, places = found
    if addresses.size == lanes.size:
        return array.take(places, mode="clip").reshape(lanes.shape)
    made = np.array(np.broadcast_to(other, lanes.shape), kind)
    made[lanes] = array.take(places, mode="clip")
    return made


def _write(touched: Touched, ptrs: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
    addresses, size, at = touched
    usual = at >= 0 and size == values.itemsize and lanes.dtype == np.bool_
    found = _elements(addresses, at, values.dtype) if usual else None
    if found is None:
        _interp._interpreter.store(ptrs, values, lanes)
        return
    array, places = found
    array[places] = values[lanes] if addresses.size < lanes.size else values.reshape(-1)


def _updated(ptrs: Any, mask: Any) -> None:
    touched = _see("atomic", "updates", ptrs, mask)
    if state.races is not None:
        state.races.atomic(*touched)


class MemoryBuilder(compat.Builder):
    """Checks and reports every access, then leaves it to Triton."""

    def create_load(self, ptrs: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        _loaded(ptrs, None, volatile)
        everywhere = _interp.TensorHandle(np.ones_like(ptrs.data, dtype=bool), tl.int1)
        return super().create_masked_load(ptrs, everywhere, None, cache, eviction, volatile)

    def create_masked_load(
        self,
        ptrs: Any,
        mask: Any,
        other: Any,
        cache_modifier: Any,
        eviction_policy: Any,
        is_volatile: Any,
    ) -> Any:
        touched = _loaded(ptrs, mask, is_volatile)
        if type(mask) is type(other) is _interp.TensorHandle:
            element = ptrs.get_element_ty()
            kind = _interp._get_np_dtype(element)
            return remember.made(_read(touched, ptrs.data, mask.data, other.data, kind), element)
        return super().create_masked_load(ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        touched = _see("store", "writes", ptrs, mask)
        if state.races is not None:
            state.races.store(*touched, _changes(ptrs, value, mask))
        if type(mask) is _interp.TensorHandle and ptrs.data.shape == value.data.shape == mask.data.shape:
            _write(touched, ptrs.data, value.data, mask.data)
            return None
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        _updated(ptr, mask)
        return super().create_atomic_rmw(op, _packed(ptr), _packed(val), _packed(mask), *rest)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, *rest: Any) -> Any:
        _updated(ptr, None)
        return super().create_atomic_cas(_packed(ptr), _packed(cmp), _packed(val), *rest)

    def many_create_load(self, ptrs: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        return self.many_create_masked_load(ptrs, None, None, cache, eviction, volatile)

    def many_create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: bool
    ) -> Any:
        if volatile:
            raise rows.Unlike
        element = ptrs.get_element_ty()
        kind = _interp._get_np_dtype(element)
        at = np.ascontiguousarray(rows.spread(ptrs))
        lanes = _lanes_of(mask, at)
        rest = np.zeros(at.shape, kind) if other is None else _like(other, at)
        touched = _together("load", "reads", at, lanes, ptrs)
        return rows.rows(_read(touched, at, lanes, rest, kind), element)

    def many_create_store(self, ptrs: Any, value: Any, *rest: Any) -> Any:
        return self.many_create_masked_store(ptrs, value, None, *rest)

    def many_create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        at = np.ascontiguousarray(rows.spread(ptrs))
        lanes, values = _lanes_of(mask, at), _like(value, at)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)

        def changes() -> np.ndarray:
            kind = np.dtype(f"u{size}")
            there = at[lanes]
            before = _interp._interpreter.load(
                there, np.ones(there.shape, bool), np.zeros(there.shape, kind), kind
            )
            return before != values[lanes].view(kind)

        _write(_together("store", "writes", at, lanes, ptrs, changes), at, values, lanes)

    def many_create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        if val.dtype.scalar == tl.bfloat16:
            raise rows.Unlike
        at = np.ascontiguousarray(rows.spread(ptr))
        lanes, values = _lanes_of(mask, at), _like(val, at)
        _together("atomic", "updates", at, lanes, ptr)
        made = super().create_atomic_rmw(
            op, rows.rows(at, ptr.dtype), rows.rows(values, val.dtype), rows.rows(lanes, tl.int1), *rest
        )
        return rows.rows(made.data, made.dtype)


def _lanes_of(mask: Any, at: np.ndarray) -> np.ndarray:
    return np.ones(at.shape, bool) if mask is None else _like(mask, at).astype(bool, copy=False)


def _like(handle: Any, at: np.ndarray) -> np.ndarray:
    """The elements that go with addresses of many programs."""
    data = rows.spread(handle)
    if data.ndim != at.ndim:
        raise rows.Unlike
    return np.ascontiguousarray(np.broadcast_to(data, at.shape))


def _together(
    kind: str, verb: str, at: np.ndarray, lanes: np.ndarray, ptrs: Any, changes: Any = None
) -> Touched:
    """As `_see`, and races, for many programs; raises Unlike before anybody was told where the accesses are
    not all to one storage."""
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    addresses = at[lanes]
    where = -1
    if addresses.size:
        where = _inside_one(addresses, size) if state.regions is not None else -1
        if where < 0:
            raise rows.Unlike
    if state.races is not None and addresses.size:
        counts = lanes.reshape(len(lanes), -1).sum(axis=1)
        state.races.many(kind, addresses, size, where, np.repeat(rows.now.epochs, counts), changes)
    for observer in state.observers:
        getattr(observer, kind)(addresses, size)
    if state.judged is not None:
        state.judged.see(kind, addresses, where)
    return addresses, size, where


def _packed(handle: Any) -> Any:
    """The same values with every lane in memory: Triton's atomics read broadcast lanes as if they were."""
    if not isinstance(handle, _interp.TensorHandle) or handle.data.flags.c_contiguous:
        return handle
    return _interp.TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)


def _touched(ptrs: Any, mask: Any) -> tuple[np.ndarray, int]:
    """Addresses of the lanes that are not masked off, and the bytes of one element."""
    size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    data = ptrs.data
    if mask is None:
        return data.reshape(-1), size
    lanes = mask if isinstance(mask, np.ndarray) else mask.data
    if lanes.shape == data.shape and lanes.dtype == np.bool_:
        return data[lanes], size
    return data[np.broadcast_to(lanes, data.shape).astype(bool)].reshape(-1), size

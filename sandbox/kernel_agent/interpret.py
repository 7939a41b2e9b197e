"""Runs one Triton kernel on the CPU, program after program, through Triton's interpreter.

Differs from launching an interpreted function in three ways that matter here: the kernel stays a JITFunction
and can be compiled too; exceptions arrive unwrapped, with the user's file and line; every access to memory is
checked against the tensors that the launch was given and shown to observers (bytes, atomics).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import triton
import triton.compiler.code_generator  # before the language is patched: it keeps a table of its functions
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter as _interp
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import compat, folds, remember, rows, vocabulary
from .kernel_python import libdevice, memory, rewritten
from .programs import Program, Programs
from .races import Races
from .source import words

_MISSING = object()
# Builtins that run what they are given, or that say something each time.
_ALWAYS_ANEW = words(
    """reduce associative_scan map_elementwise inline_asm_elementwise static_print static_assert
    device_print"""
)


class Observer(Protocol):
    """Told about each access of an interpreted kernel, after masks: `lanes` addresses of `size` bytes."""

    def load(self, addresses: np.ndarray, size: int) -> None: ...
    def store(self, addresses: np.ndarray, size: int) -> None: ...
    def atomic(self, addresses: np.ndarray, size: int) -> None: ...


class OutOfBounds(IndexError):
    """A kernel read or wrote outside every tensor that it was given."""


@dataclass
class _State:
    """What the running launch may touch, and who watches. Interpreted launches never nest."""

    running: bool = False
    regions: np.ndarray | None = None  # rows of (first byte, end), sorted; None: addresses are not checked
    starts: list[int] = field(default_factory=list)  # the columns of `regions`
    ends: list[int] = field(default_factory=list)
    arrays: dict[tuple[int, Any], np.ndarray] = field(default_factory=dict)  # storages, by element type
    observers: list[Observer] = field(default_factory=list)
    judged: Judged | None = None  # how launches run now, if somebody judges them
    races: Races | None = None  # of the running launch


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
            into.add(_state.starts[at])
        elif _state.regions is None:
            self.blind = True
        elif addresses.size:
            places = np.unique(np.searchsorted(_state.regions[:, 0], addresses, side="right") - 1)
            into.update(_state.regions[places, 0].tolist())


_state = _State()


def running() -> bool:
    """Whether an interpreted kernel is running now, so that helpers must be interpreted too."""
    return _state.running


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show `observer` every access of the launches inside."""
    _state.observers.append(observer)
    try:
        yield
    finally:
        _state.observers.remove(observer)


@contextlib.contextmanager
def judged(order: str | int | None, ordering: bool) -> Iterator[Judged]:
    """Run the launches inside in that order, and find their races. Not nested."""
    _state.judged = Judged(order, ordering)
    try:
        yield _state.judged
    finally:
        _state.judged = None


def _programs(grid: tuple[int, ...]) -> list[tuple[int, int, int]]:
    nx, ny, nz = (*grid, 1, 1, 1)[:3]
    programs = list(itertools.product(range(nx), range(ny), range(nz)))
    judged = _state.judged
    if judged is not None and not judged.ordering:
        if judged.order == "reversed":
            programs.reverse()
        elif judged.order is not None:
            random.Random(judged.order).shuffle(programs)
    return programs


def run(kernel: JITFunction, grid: tuple[int, ...], args: Mapping[str, Any]) -> None:
    """Run `kernel` for each program of `grid`. `args` binds every parameter; tensors are on the CPU."""
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    function = rewritten(kernel)
    with _language(), np.errstate(all="ignore"):
        bound = {name: value if name in constexprs else _convert(value) for name, value in args.items()}
        _state.regions = regions = _regions(args.values())
        _state.starts, _state.ends = ([], []) if regions is None else regions.T.tolist()
        _state.arrays = {}
        builder = _interp.interpreter_builder
        builder.set_grid_dim(*(*grid, 1, 1, 1)[:3])
        programs = _programs(grid)
        judged = _state.judged
        races = None
        if judged is not None and len(programs) > 1:
            races = _state.races = Races(regions, judged.ordering, functools.partial(_name_of, args))
        alone = len(programs) < 2 or (judged.ordering if judged else vocabulary.ordering(kernel, args))
        Programs(kernel, function, bound, memory(), _Turns(races), not alone).run(programs)
        if judged is not None and races is not None:
            judged.found += races.found.values()


@dataclass
class _Turns:
    """Whose turn it is, for what programs ask and for races."""

    races: Races | None

    def begin(self, program: Program) -> None:
        _interp.interpreter_builder.set_grid_idx(*program)
        if self.races is not None:
            self.races.begin(program)

    def begin_many(self, programs: list[Program]) -> np.ndarray:
        none = np.zeros(len(programs), np.int32)
        return none if self.races is None else self.races.begin_many(programs)

    def turn_to(self, program: Program, epoch: int) -> None:
        _interp.interpreter_builder.set_grid_idx(*program)
        if self.races is not None:
            self.races.turn_to(epoch)


def _name_of(args: Mapping[str, Any], address: int) -> tuple[str, int]:
    """The argument that begins last before an address, and the number of the element there."""
    starts = [(t.data_ptr(), name, t.element_size()) for name, v in args.items() for t in tensors_in([v])]
    before = [start for start in starts if start[0] <= address]
    if not before:
        return "memory", address
    first, name, size = max(before, key=lambda start: start[0])
    return name, (address - first) // size


def call_helper(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A jitted function called from an interpreted kernel."""
    kwargs.pop("_semantic", None)
    watch = memory().watch
    if watch is not None:
        watch.enter(kernel.fn)
    return rewritten(kernel)(*args, **kwargs)


@functools.cache
def _folds() -> dict[str, Callable[..., Any]]:
    reduce, scan = folds.replacements(rewritten)
    return {"reduce": reduce, "associative_scan": scan}


def _shim() -> None: ...


_shim_in_language = types.FunctionType(_shim.__code__, {"tl": tl, "core": tl.core})


def _patched_objects() -> list[Any]:
    descriptor = getattr(tl.core, "tensor_descriptor_base", None)
    objects = [tl, tl.core, tl.math, tl.tensor, tl.dtype, descriptor, *libdevice()]
    return [obj for obj in objects if obj is not None]


def _patch_libdevice() -> None:
    cuda, generic = libdevice()
    for name, function in dict(vars(cuda)).items():
        if tl.core.is_builtin(function):
            bound = functools.partial(function, _semantic=_interp.interpreter_semantic)
            setattr(cuda, name, bound)
            if hasattr(generic, name):
                setattr(generic, name, bound)


@functools.cache
def _patches() -> list[tuple[Any, str, Any, Any]]:
    """What the interpreter changes in triton.language: object, attribute, original, replacement."""
    builder = _MemoryBuilder()
    # With it, sums of integers are computed twice, for an assertion that the interpreter then leaves out.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _interp._get_np_dtype = _element_type
    compat.install(builder)
    before = [(obj, dict(vars(obj))) for obj in _patched_objects()]
    _interp._patch_lang(_shim_in_language)
    _patch_libdevice()
    changes = []
    for obj, originals in before:
        for name, value in dict(vars(obj)).items():
            if originals.get(name, _MISSING) is not value:
                changes.append((obj, name, originals.get(name, _MISSING), value))
    _undo(changes)
    calls = memory()
    return [
        (obj, name, original, _quicker(calls, name, original, new)) for obj, name, original, new in changes
    ]


def _quicker(memory: remember.Memory, name: str, original: Any, replacement: Any) -> Any:
    """What the interpreter puts in place of `original`, with types worked out once for a kind of operands."""
    if name in ("__bool__", "__index__"):

        def looks(tensor: Any) -> Any:
            if tensor.handle.data.size != 1 and folds.deciding():
                raise folds.DecidesOnElements
            if tensor.handle.data.size == 1:  # a larger one is always true
                memory.looked_at_elements()
                if memory.watch is not None and memory.watch.depth == 0:
                    return memory.watch.ask(name.strip("_"), [tensor])
            return replacement(tensor)

        return looks
    if isinstance(replacement, property) and replacement.fget is not None:
        return property(memory.watching(replacement.fget))
    builtin = tl.core.is_builtin(original)
    if builtin and isinstance(replacement, types.FunctionType) and name not in _ALWAYS_ANEW:
        return memory.remembering(original, replacement)
    if (
        builtin
        and name in ("reduce", "associative_scan")
        and "_patch_reduce_scan" in replacement.__qualname__
    ):
        replacement = _folds()[name]
    watched = callable(replacement) and (builtin or isinstance(replacement, functools.partial))
    return memory.watching(replacement) if watched else replacement


_find_element_type = _interp._get_np_dtype


def _element_type(ty: Any) -> np.dtype:
    """The NumPy type of a Triton type, looked up once for each type object."""
    try:
        return ty._kernel_agent_elements
    except AttributeError:
        ty._kernel_agent_elements = found = _find_element_type(ty)
        return found


def _undo(changes: list[tuple[Any, str, Any, Any]]) -> None:
    for obj, name, original, _ in changes:
        if original is _MISSING:
            delattr(obj, name)
        else:
            setattr(obj, name, original)


@contextlib.contextmanager
def _language() -> Iterator[None]:
    """triton.language with the interpreter's functions in it, for the duration of one launch."""
    if _state.running:
        raise RuntimeError("a kernel launches a kernel")
    changes = _patches()
    knobs = triton.knobs.runtime.__dict__
    interpret = knobs.get("interpret", False)
    _state.running = True
    try:
        knobs["interpret"] = True
        for obj, name, _, replacement in changes:
            setattr(obj, name, replacement)
        yield
    finally:
        _undo(changes)
        knobs["interpret"] = interpret
        _state.running = False
        _state.regions = None
        _state.arrays = {}
        _state.races = None


def _convert(value: Any) -> Any:
    """An argument as compiled code would see it: numbers and pointers become typed scalars."""
    if isinstance(value, bool):
        return tl.tensor(_interp.TensorHandle(np.array([value], dtype=np.bool_), tl.int1), tl.int1)
    if isinstance(value, float):
        return tl.tensor(_interp.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    if isinstance(value, tuple):
        items = [_convert(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return _interp._implicit_cvt(value)


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
    for tensor in tensors_in(values):
        if not tensor.dtype.is_floating_point and tensor.element_size() == 8 and _holds_addresses(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes():
            spans.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return np.array(sorted(spans), dtype=np.uint64).reshape(-1, 2)


def _holds_addresses(tensor: Any) -> bool:
    """Grouped kernels pass tables of data_ptr() values; ordinary indices are far smaller than any address."""
    with _disable_current_modes():  # this question is not the candidate's
        return tensor.numel() > 0 and int(tensor.max()) >= 1 << 32


Touched = tuple[np.ndarray, int, int]  # addresses, bytes of each, storage (or -1)


def _see(kind: str, verb: str, ptrs: Any, mask: Any) -> Touched:
    """Check an access, and show it to the observers. What was accessed: addresses, bytes, storage (or -1)."""
    addresses, size = _touched(ptrs, mask)
    at = _check(addresses, size, verb)
    for observer in _state.observers:
        getattr(observer, kind)(addresses, size)
    if _state.judged is not None:
        _state.judged.see(kind, addresses, at)
    return addresses, size, at


def _check(addresses: np.ndarray, size: int, verb: str) -> int:
    """The number of the storage that has them all, -1 if there is no such one."""
    regions = _state.regions
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
    at = bisect.bisect_right(_state.starts, low) - 1
    return at if at >= 0 and high + size <= _state.ends[at] else -1


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
    if _state.races is not None:
        (_state.races.atomic if volatile else _state.races.load)(*touched)
    return touched


def _elements(addresses: np.ndarray, at: int, kind: np.dtype) -> tuple[np.ndarray, np.ndarray] | None:
    """A storage as an array, and the places in it at those addresses. None: they are not of whole elements.
    Triton asks for each element by itself what it is."""
    array = _state.arrays.get((at, kind))
    if array is None:
        start, count = _state.starts[at], (_state.ends[at] - _state.starts[at]) // kind.itemsize
        memory = (ctypes.c_char * (count * kind.itemsize)).from_address(start)
        array = _state.arrays[at, kind] = np.frombuffer(memory, kind)
    offsets = (addresses - np.uint64(_state.starts[at])).view(np.int64)
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
    if _state.races is not None:
        _state.races.atomic(*touched)


class _MemoryBuilder(compat.Builder):
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
        if _state.races is not None:
            _state.races.store(*touched, _changes(ptrs, value, mask))
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
            before = _interp._interpreter.load(there, np.ones(there.shape, bool), np.zeros(there.shape, kind), kind)
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
        where = _inside_one(addresses, size) if _state.regions is not None else -1
        if where < 0:
            raise rows.Unlike
    if _state.races is not None and addresses.size:
        counts = lanes.reshape(len(lanes), -1).sum(axis=1)
        _state.races.many(kind, addresses, size, where, np.repeat(rows.now.epochs, counts), changes)
    for observer in _state.observers:
        getattr(observer, kind)(addresses, size)
    if _state.judged is not None:
        _state.judged.see(kind, addresses, where)
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

"""Runs one Triton kernel on the CPU, through Triton's interpreter.

Differs from launching an interpreted function in four ways that matter here: the kernel stays a JITFunction
and can be compiled too; exceptions arrive unwrapped, with the user's file and line; every access to memory is
checked against the tensors that the launch was given and shown to observers (accesses.py); programs that take
the same way are run many at a time (together.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.compiler.code_generator  # before the language is patched: it keeps a table of its functions
import triton.language as tl
from triton.runtime import interpreter as _interp
from triton.runtime.jit import JITFunction

from . import compat, folds, remember, vocabulary
from .accesses import MemoryBuilder, state, tensors_in
from .kernel_python import libdevice, memory, rewritten
from .races import Races
from .source import words
from .together import Program, Programs

_MISSING = object()
# Builtins that run what they are given, or that say something each time.
_ALWAYS_ANEW = words(
    """reduce associative_scan map_elementwise inline_asm_elementwise static_print static_assert
    device_print"""
)


def _programs(grid: tuple[int, ...]) -> list[tuple[int, int, int]]:
    nx, ny, nz = (*grid, 1, 1, 1)[:3]
    programs = list(itertools.product(range(nx), range(ny), range(nz)))
    judged = state.judged
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
        state.open(args.values())
        builder = _interp.interpreter_builder
        builder.set_grid_dim(*(*grid, 1, 1, 1)[:3])
        programs = _programs(grid)
        judged = state.judged
        races = None
        if judged is not None and len(programs) > 1:
            races = state.races = Races(state.regions, judged.ordering, functools.partial(_name_of, args))
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
    builder = MemoryBuilder()
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
    if name == "static_assert":
        replacement.pure = True
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
    if state.running:
        raise RuntimeError("a kernel launches a kernel")
    changes = _patches()
    knobs = triton.knobs.runtime.__dict__
    interpret = knobs.get("interpret", False)
    state.running = True
    try:
        knobs["interpret"] = True
        for obj, name, _, replacement in changes:
            setattr(obj, name, replacement)
        yield
    finally:
        _undo(changes)
        knobs["interpret"] = interpret
        state.close()


def _convert(value: Any) -> Any:
    """An argument as compiled code would see it: numbers and pointers become typed scalars."""
    if isinstance(value, bool):
        return tl.tensor(_interp.TensorHandle(np.array([value], dtype=np.bool_), tl.int1), tl.int1)
    if isinstance(value, float):
        return tl.tensor(_interp.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    if isinstance(value, tuple):
        items = [_convert(item) for item in value]
        return type(value)(*items) if hasattr(type(value), "_fields") else tuple(items)
    return _interp._implicit_cvt(value)

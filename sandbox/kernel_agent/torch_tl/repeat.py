"""Triton's semantic layer, asked once for each kind of operands.

For `a + b` that layer checks, promotes and broadcasts types, which costs many times what the operation
does. It sees types, numbers and constants, never elements, so for operands of the same kinds it asks the
builder for the same. The second operation on given kinds writes down what was asked; later ones do only
that, on their own operands. Loads and stores are no exception: the builder is asked again for each. An
operation that cannot be written down (a Python decision was taken on elements, a value of an unknown kind,
a handle that the builder did not make) is evaluated as before, each time. One that raises is not written
down at all.

What is written down holds for one precision and one device, whatever the launch: replays get the launch's
builder.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from kernel_agent.remember import Unknown, kind_of, like
from kernel_agent.torch_tl.builder import PLAIN, Builder
from kernel_agent.torch_tl.handles import BlockPointer, Handle, int_dtype
from kernel_agent.torch_tl.memory import Memory

MOST_ENTRIES = 10_000  # a kernel whose numbers never repeat must not fill the memory
MOST_FOLDED = 1 << 13  # elements of a constant that is kept
NOTHING: dict[str, Any] = {}
DIRECT = {f"create_{name}": act for names, act in PLAIN.items() for name in names.split()}
FLOAT_CASTS = ("create_si_to_fp", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc")
MOVES = ("create_splat", "create_broadcast", "create_expand_dims", "create_reshape", "create_trans")
FOLDED = {"create_int_cast", *MOVES, *FLOAT_CASTS, *DIRECT}

_Tensor = tl.tensor
_MADE = (Handle, BlockPointer)
_SIMPLE = (str, bool, bytes, type(None), torch.dtype)
_SEEN = object()
_TUPLES = (tuple, list, tl.core.tuple)
_codes: dict[str, types.CodeType] = {}


def note(value: Any, key: list[Any], tensors: list[Any]) -> None:
    """Add a value to the key of an operation: its kind if it is a tensor, else itself. Tensors also go
    to `tensors`. Raises Unknown."""
    what = type(value)
    if what is _Tensor:
        key.append(kind_of(value.type))
        tensors.append(value)
    elif what is int:
        key.append(value)
    elif what in _SIMPLE:
        key += (what, value)
    elif what is float:
        key += (what, value if value and value == value else repr(value))
    elif what is tl.constexpr:
        key.append(what)
        note(value.value, key, tensors)
    elif what in _TUPLES:
        key += (what, len(value))
        for item in value:
            note(item, key, tensors)
    elif what is slice and value == slice(None):
        key.append(what)
    elif isinstance(value, tl.dtype):
        key += (tl.dtype, kind_of(value))
    else:
        raise Unknown


def _is_constant(name: str) -> bool:
    """Whether a method of the builder takes numbers and types alone, and is no question about the launch."""
    return name in ("constant", "create_make_range") or name.startswith("get_")


class Recorder:
    """A builder that does what the real one does, and writes down what it was asked for."""

    def __init__(self, builder: Builder, tensors: list[Any]) -> None:
        self._builder = builder
        self.handles: list[Any] = [tensor.handle for tensor in tensors]
        self._slots = {id(handle): slot for slot, handle in enumerate(self.handles)}
        self.steps: list[tuple[str, tuple[Any, ...], Any]] = []
        self.usable = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found):
            return found

        def ask(*args: Any, **kwargs: Any) -> Any:
            kept = tuple(list(arg) if type(arg) is list else arg for arg in args)
            made = found(*args, **kwargs)
            if isinstance(made, tl.dtype):
                return made
            self.usable = self.usable and not kwargs
            several = type(made) is tuple
            handles = made if several else () if made is None else (made,)
            if not all(isinstance(handle, _MADE) for handle in handles):
                self.usable = False
                return made
            if not several and id(made) in self._slots:
                if not _is_constant(name):
                    return made  # a cast that changes nothing gives its operand
                made = copy.copy(made)  # a constant may be an operand's handle, and is another value
                handles = (made,)
            slots = [self._new(handle) for handle in handles]
            self.steps.append((name, kept, slots if several or made is None else slots[0]))
            return made

        return ask

    def _new(self, handle: Any) -> int:
        self._slots[id(handle)] = len(self.handles)
        self.handles.append(handle)
        return len(self.handles) - 1

    def slot(self, handle: Any) -> int | None:
        return self._slots.get(id(handle))


class _Writer:
    """Makes a function of a recorder's steps: the builder and the tensors in, the result out.

    Slot n is `h<n>` as a handle and `d<n>` as a torch tensor, of which a line is written when it is first
    needed."""

    def __init__(self, recorder: Recorder, memory: Memory, tensors: list[Any], result: Any) -> None:
        self.recorder = recorder
        self.memory = memory
        self.tensors = tensors
        self.scope: dict[str, Any] = {"Handle": Handle}
        self.lines: list[str] = []
        self.written: set[str] = set()
        self.folded: set[int] = set()
        for name, args, made in recorder.steps:
            if type(made) is int and self._constant(name, args, made):
                self.folded.add(made)
            else:
                self._step(name, args, made)
        self.lines.append(f"return {self._result(result)}")

    def _constant(self, name: str, args: tuple[Any, ...], made: int) -> bool:
        """Whether this is a value made of numbers alone, to be kept."""
        if name not in FOLDED and not _is_constant(name):
            return False
        if not all(self.recorder.slot(arg) in self.folded for arg in args if isinstance(arg, _MADE)):
            return False
        data = self.recorder.handles[made].data
        return name in MOVES or data.numel() <= MOST_FOLDED

    def _step(self, name: str, args: tuple[Any, ...], made: Any) -> None:
        if type(made) is int:
            direct = self._direct(name, args)
            if direct is not None:
                self._line(f"d{made}", direct)
                return
        call = f"b.{name}({', '.join(map(self._argument, args))})"
        if type(made) is int:
            self._line(f"h{made}", call)
        elif made:
            self.lines.append(f"{', '.join(f'h{slot}' for slot in made)}, = {call}")
            self.written.update(f"h{slot}" for slot in made)
        else:
            self.lines.append(call)

    def _direct(self, name: str, args: tuple[Any, ...]) -> str | None:
        """What a method of the builder does to plain data, without the detour."""
        if name in DIRECT:
            return f"{self._bind(DIRECT[name])}({', '.join(map(self._data, args))})"
        if name in FLOAT_CASTS:
            return f"{self._data(args[0])}.to({self._bind(self.memory.value_dtype(args[1].scalar))})"
        if name == "create_int_cast" and args[2]:
            return f"{self._data(args[0])}.to({self._bind(int_dtype(args[1]))})"
        return None

    def _line(self, name: str, value: str) -> str:
        self.lines.append(f"{name} = {value}")
        self.written.add(name)
        return name

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _slot(self, handle: Any) -> int:
        slot = self.recorder.slot(handle)
        if slot is None:
            raise Unknown
        return slot

    def _handle(self, slot: int) -> str:
        if slot in self.folded:
            return self._bind(self.recorder.handles[slot])
        name = f"h{slot}"
        if name in self.written:
            return name
        if slot < len(self.tensors):
            return self._line(name, f"t{slot}.handle")
        return self._line(name, f"Handle(d{slot})")

    def _data(self, handle: Any) -> str:
        slot = self._slot(handle)
        if slot in self.folded:
            return self._bind(self.recorder.handles[slot].data)
        name = f"d{slot}"
        return name if name in self.written else self._line(name, f"{self._handle(slot)}.data")

    def _argument(self, value: Any) -> str:
        if isinstance(value, _MADE):
            return self._handle(self._slot(value))
        if type(value) in (list, tuple):
            items = "".join(f"{self._argument(item)}, " for item in value)
            return f"[{items}]" if type(value) is list else f"({items})"
        if type(value) in (int, float, tl.constexpr, *_SIMPLE) or isinstance(value, tl.dtype):
            return self._bind(value)
        if type(value).__module__.startswith("triton._C"):  # an enumeration
            return self._bind(value)
        raise Unknown

    def _result(self, result: Any) -> str:
        if result is None:
            return "None"
        if type(result) in (tuple, tl.core.tuple):
            items = "".join(f"{self._result(item)}, " for item in result)
            return f"({items})" if type(result) is tuple else f"{self._bind(tl.core.tuple)}(({items}))"
        if type(result) is not _Tensor:
            raise Unknown
        for at, tensor in enumerate(self.tensors):
            if tensor is result:
                return f"t{at}"
        handle = "None" if result.handle is None else self._handle(self._slot(result.handle))
        return f"{self._bind(like(result))}({handle})"

    def function(self) -> Callable[..., Any]:
        operands = "".join(f", t{slot}" for slot in range(len(self.tensors)))
        text = f"def repeat(b{operands}):\n    " + "\n    ".join(self.lines) + "\n"
        code = _codes.get(text)
        if code is None:
            code = _codes[text] = compile(text, "<repeated>", "exec")
        exec(code, self.scope)  # noqa: S102
        made: Callable[..., Any] = self.scope["repeat"]
        return made


class Repeats:
    """What is written down for one precision and device."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}
        self.recorder: Recorder | None = None

    def looked_at_elements(self) -> None:
        """A decision is taken on the value of a tensor: what comes after it holds for this operation only."""
        if self.recorder is not None:
            self.recorder.usable = False

    def ask(
        self,
        semantic: Any,
        which: Any,
        plain: Callable[[Any, Any, Any], Any],
        args: Any,
        kwargs: dict[str, Any] = NOTHING,
    ) -> Any:
        """What plain(which, args, kwargs) gives, which uses `semantic`. `which` says what `plain` does."""
        if self.recorder is not None:  # a part of the operation that is being written down
            return plain(which, args, kwargs)
        key = [which]
        tensors: list[Any] = []
        try:
            for arg in args:
                if type(arg) is _Tensor:  # as note() does, without the call
                    key.append(kind_of(arg.type))
                    tensors.append(arg)
                else:
                    note(arg, key, tensors)
            for name, arg in kwargs.items():
                key.append(name)
                note(arg, key, tensors)
        except Unknown:
            return plain(which, args, kwargs)
        if len(tensors) > 1:
            ids = [id(tensor.handle) for tensor in tensors]
            if len(set(ids)) < len(ids):
                key.append(tuple(map(ids.index, ids)))  # x * x says nothing of x * y
        found = self.known.get(tuple(key))
        if type(found) is types.FunctionType:
            return found(semantic.builder, *tensors)
        if found is _SEEN:
            result, self.known[tuple(key)] = self._record(semantic, which, plain, args, kwargs, tensors)
            return result
        if found is None and len(self.known) < MOST_ENTRIES:
            self.known[tuple(key)] = _SEEN  # the next time is worth writing down
        return plain(which, args, kwargs)

    def _record(
        self, semantic: Any, which: Any, plain: Any, args: Any, kwargs: dict[str, Any], tensors: list[Any]
    ) -> tuple[Any, Callable[..., Any] | bool]:
        """The result of one operation, and the function that repeats it, or False."""
        builder = semantic.builder
        recorder = self.recorder = semantic.builder = Recorder(builder, tensors)
        try:
            result = plain(which, args, kwargs)
        finally:
            self.recorder, semantic.builder = None, builder
        if not recorder.usable:
            return result, False
        try:
            return result, _Writer(recorder, builder.memory, tensors, result).function()
        except Unknown:
            return result, False


_repeats: dict[tuple[str, torch.device], Repeats] = {}


def repeats_of(memory: Memory) -> Repeats:
    return _repeats.setdefault((memory.precision, memory.device), Repeats())

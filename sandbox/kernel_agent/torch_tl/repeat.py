"""Triton's semantic layer, asked once for each kind of operands (remember.py), for the torch-backed builder.

Loads and stores are no exception: the builder is asked again for each. An operation that raises is not
written down at all. What is written down holds for one precision and one device, of the evaluation and of the
call, whatever the launch: replays get the launch's builder.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl

from kernel_agent.remember import SEEN, Calls, Recorder, Unknown, Writer, key_of, like
from kernel_agent.torch_tl.builder import PLAIN, Builder
from kernel_agent.torch_tl.handles import BlockPointer, Handle, int_dtype
from kernel_agent.torch_tl.memory import Memory

MOST_FOLDED = 1 << 13  # elements of a constant that is kept
NOTHING: dict[str, Any] = {}
DIRECT = {f"create_{name}": act for names, act in PLAIN.items() for name in names.split()}
FLOAT_CASTS = ("create_si_to_fp", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc")
MOVES = ("create_splat", "create_broadcast", "create_expand_dims", "create_reshape", "create_trans")
FOLDED = {"create_int_cast", *MOVES, *FLOAT_CASTS, *DIRECT}

_Tensor = tl.tensor
_MADE = (Handle, BlockPointer)
_SIMPLE = (int, float, str, bool, bytes, type(None), torch.dtype, tl.constexpr)


def _is_constant(name: str) -> bool:
    """Whether a method of the builder takes numbers and types alone, and is no question about the launch."""
    return name in ("constant", "create_make_range") or name.startswith("get_")


class _Writer(Writer):
    """The builder and the tensors in, the result out.

    Slot n is `h<n>` as a handle and `d<n>` as a torch tensor, of which a line is written when it is first
    needed."""

    def __init__(self, recorder: Recorder, memory: Memory, tensors: list[Any], result: Any) -> None:
        super().__init__(recorder)
        self.scope["Handle"] = Handle
        self.memory = memory
        self.tensors = tensors
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
        if type(value) in _SIMPLE or isinstance(value, tl.dtype):
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
        return self._function("b" + "".join(f", t{slot}" for slot in range(len(self.tensors))))


class Repeats(Calls):
    """What is written down for one precision and device."""

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
        if semantic.builder.memory.watch is not None:
            semantic.builder.memory.watch()
        try:
            noted, tensors, handles = key_of(which, args, kwargs)
        except Unknown:
            return plain(which, args, kwargs)
        key = tuple(noted)
        found = self.known.get(key)
        if type(found) is types.FunctionType:
            return found(semantic.builder, *tensors)
        if found is not SEEN:
            self.seen(key)
            return plain(which, args, kwargs)
        builder: Builder = semantic.builder
        recorder = Recorder(builder, handles, _MADE, _is_constant)
        semantic.builder = recorder
        try:
            return self.record(
                key,
                recorder,
                functools.partial(plain, which, args, kwargs),
                lambda made: _Writer(recorder, builder.memory, tensors, made).function(),
            )
        finally:
            semantic.builder = builder


_repeats: dict[tuple[str, torch.device, bool], Repeats] = {}


def repeats_of(memory: Memory) -> Repeats:
    return _repeats.setdefault((memory.precision, memory.device, memory.compiled), Repeats())

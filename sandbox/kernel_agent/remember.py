"""Triton's semantic layer, remembered: for operands of one kind it asks the builder for the same each time.

The interpreter evaluates `a + b` by checking, promoting and broadcasting types anew for every program,
which costs many times what the operation does. Those checks see types, numbers and constants, never
elements, as in the compiler. So the third call with operands of the same kinds replays the operations that
the second one asked the builder for, on the new elements: the same NumPy functions on the same arrays, and
so the same bits. What cannot be replayed (a result that is no plain tensor, a decision that looked at
elements, a value of an unknown kind) is evaluated as before, each time.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as _interp

MOST_ENTRIES = 20_000  # a kernel whose numbers never repeat must not fill the memory
_CONSTANT = (
    "get_", "create_splat", "create_broadcast", "create_expand_dims", "create_make_range",
    "create_int_cast",
)  # fmt: skip
_NUMBERS = (float, complex)
_SIMPLE = (bool, str, bytes, type(None))

_Handle = _interp.TensorHandle
_Tensor = tl.tensor
_kinds: dict[Any, object] = {}
_code: dict[str, types.CodeType] = {}


class Unknown(Exception):
    """A value of a kind that is not remembered."""


class _Kind:
    """Stands for all equal Triton types; compared by identity, which is quick."""


def kind_of(ty: Any) -> Any:
    """The kind of a Triton type, computed once for each type object."""
    try:
        return ty._kernel_agent_kind
    except AttributeError:
        pass
    if not isinstance(ty, tl.dtype):
        raise Unknown
    parts = [type(ty), ty.name, getattr(ty, "shape", None)]
    parts += [getattr(ty, "address_space", None), getattr(ty, "const", None)]
    element = getattr(ty, "element_ty", None)
    parts.append(None if element is None else kind_of(element))
    kind = _kinds.setdefault(tuple(parts), _Kind())
    ty._kernel_agent_kind = kind
    return kind


def _note(value: Any, key: list[Any], handles: list[Any]) -> None:
    """Add a value to the key of a call: its kind if it is a tensor, else itself; and handles to `handles`.

    Raises Unknown."""
    what = type(value)
    if what is _Tensor:
        handle = value.handle
        if type(handle) is not _Handle:
            raise Unknown
        key += (kind_of(value.type), kind_of(handle.dtype))
        handles.append(handle)
    elif what is int:
        key.append(value)
    elif what in _SIMPLE:
        key += (what, value)
    elif what in _NUMBERS:
        key += (what, repr(value))
    elif what is tl.constexpr:
        key.append(what)
        _note(value.value, key, handles)
    elif what in (tuple, list, tl.core.tuple):
        key += (what, len(value))
        for item in value:
            _note(item, key, handles)
    elif what is slice and value == slice(None):
        key.append(what)
    elif isinstance(value, tl.dtype):
        key += (tl.dtype, kind_of(value))
    else:
        raise Unknown


def _same(handles: list[Any]) -> tuple[int, ...]:
    """For each operand the first one that is the same object."""
    ids = [id(handle) for handle in handles]
    return tuple(map(ids.index, ids))


class Recorder:
    """A builder that does what the real one does, and writes down what it was asked for."""

    def __init__(self, builder: Any, handles: list[Any]) -> None:
        self._builder = builder
        self._slots = {id(handle): slot for slot, handle in enumerate(handles)}
        self.inputs = len(handles)
        self.handles = list(handles)
        self.steps: list[tuple[str, tuple[Any, ...], list[int]]] = []
        self.usable = True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._builder, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(arg) if type(arg) is list else arg for arg in args)
            result = found(*args, **kwargs)
            self.usable = self.usable and not kwargs
            if isinstance(result, tl.dtype):
                return result
            made = result if type(result) is tuple else () if result is None else (result,)
            if not all(type(handle) is _Handle for handle in made):
                self.usable = False
                return result
            self.steps.append((name, args, [self._new(handle) for handle in made]))
            return result

        return call

    def _new(self, handle: Any) -> int:
        self._slots[id(handle)] = len(self.handles)
        self.handles.append(handle)
        return len(self.handles) - 1

    def slot(self, handle: Any) -> int | None:
        return self._slots.get(id(handle))


class _Writer:
    """Makes a function of a recorder's steps: handles of the operands in, the result out."""

    def __init__(self, recorder: Recorder, result: Any) -> None:
        self.recorder = recorder
        self.scope: dict[str, Any] = {}
        self.lines: list[str] = []
        self.known: set[int] = set()  # slots that hold the same value in each call
        output = None if result is None or result.handle is None else recorder.slot(result.handle)
        if result is not None and result.handle is not None and output is None:
            raise Unknown
        folding = self._folded(output)
        for name, args, made in recorder.steps:
            if made and made[0] in folding:
                self.known.add(made[0])
                continue
            left = ", ".join(f"h{slot}" for slot in made) + (" = " if made else "")
            self.lines.append(f"    {left}{self._call(name, args, made)}")
        self.lines.append(f"    return {self._returned(result, output)}")

    def _folded(self, output: int | None) -> set[int]:
        """Slots made of constants alone. None where the result is one: calls must not share results."""
        folded: set[int] = set()
        for name, args, made in self.recorder.steps:
            constant = name.startswith(_CONSTANT) and name != "create_get_program_id"
            used = [self.recorder.slot(arg) for arg in args if type(arg) is _Handle]
            if constant and len(made) == 1 and all(slot in folded for slot in used):
                folded.add(made[0])
        return set() if output in folded else folded

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _argument(self, value: Any) -> str:
        if type(value) is _Handle:
            slot = self.recorder.slot(value)
            if slot is None:
                raise Unknown
            return self._bind(value) if slot in self.known else f"h{slot}"
        if type(value) in (list, tuple) and any(type(item) is _Handle for item in value):
            return "[" + ", ".join(self._argument(item) for item in value) + "]"
        if isinstance(value, (_Handle, _Tensor)) or type(value).__name__.endswith("Handle"):
            raise Unknown
        return self._bind(value)

    def _call(self, name: str, args: tuple[Any, ...], made: list[int]) -> str:
        builder = self.recorder._builder
        quick = _quick(builder, name, args)
        if quick is not None:
            function, operands = quick
            return f"{self._bind(function)}({', '.join(self._argument(arg) for arg in operands)})"
        return f"{self._bind(getattr(builder, name))}({', '.join(self._argument(arg) for arg in args)})"

    def _returned(self, result: Any, output: int | None) -> str:
        if result is None:
            return "None"
        return f"{self._bind(like(result))}({'None' if output is None else f'h{output}'})"

    def function(self) -> Callable[..., Any]:
        operands = ", ".join(f"h{slot}" for slot in range(self.recorder.inputs))
        text = f"def replay({operands}):\n" + "\n".join(self.lines)
        code = _code.get(text)
        if code is None:
            code = _code[text] = compile(text, "<remembered>", "exec")
        exec(code, self.scope)  # noqa: S102
        return self.scope["replay"]


def like(tensor: Any) -> Callable[[Any], Any]:
    """Makes tensors of the type of `tensor` around other handles."""
    template = dict(vars(tensor))

    def make(handle: Any) -> Any:
        made = object.__new__(_Tensor)
        made.__dict__ = {**template, "handle": handle}
        return made

    return make


class _Probe:
    """Stands for a builder, to learn which NumPy function a method of it applies."""

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        return ("binary", op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return ("unary", op)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return ("cast", dst_type)


def _quick(
    builder: Any, name: str, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """What a method of the builder does to plain handles, without detours: a function, and its arguments."""
    handles = [arg for arg in args if type(arg) is _Handle]
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        return None
    if name == "create_addptr":
        size = max(1, args[0].get_element_ty().primitive_bitwidth // 8)
        return _moved(size, args[0].dtype), args
    method = getattr(type(builder), name)
    if method is not vars(_interp.InterpreterBuilder).get(name):
        return None
    try:
        how, op = method(_Probe(), *args)
    except (AttributeError, TypeError, ValueError):
        return None
    if how == "binary" and len(handles) == 2:
        return _binary(op, handles[0].dtype.scalar), args
    if how == "unary" and len(handles) == 1:
        return _unary(op, handles[0].dtype.scalar), args
    if how == "cast" and op.scalar != tl.bfloat16:
        return _cast(_interp._get_np_dtype(op), op.scalar), args[:1]
    return None


def _made(data: np.ndarray, dtype: Any) -> Any:
    """A handle, without asking again whether the array's elements fit the type."""
    handle = object.__new__(_Handle)
    handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
    return handle


def _bytes(dtype: Any) -> float:
    """The most bytes that an element of an array of this type may have."""
    return np.inf if isinstance(dtype, tl.pointer_type) else max(8, dtype.primitive_bitwidth) // 8


def _binary(op: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    most = _bytes(dtype)

    def apply(lhs: Any, rhs: Any) -> Any:
        data = op(lhs.data, rhs.data)
        if data.itemsize > most:
            data = data.astype(_interp._get_np_dtype(dtype))
        return _made(data, dtype)

    return apply


def _unary(op: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    return lambda arg: _Handle(op(arg.data), dtype)


def _cast(element: np.dtype, dtype: Any) -> Callable[..., Any]:
    return lambda src: _made(src.data.astype(element), dtype)


def _moved(size: int, dtype: Any) -> Callable[..., Any]:
    return lambda ptr, offset: _made(ptr.data + size * offset.data.astype(np.uint64), dtype)


class Memory:
    """What is remembered of one process. `builder` does the operations."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.recorder: Recorder | None = None
        self.semantic: TritonSemantic | None = None
        self.entries = 0

    def looked_at_elements(self) -> None:
        """A decision is taken from the value of a tensor: what comes after it holds for this call only."""
        if self.recorder is not None:
            self.recorder.usable = False

    def remembering(self, member: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """`plain` evaluates the builtin `member`; the result does so too, sooner from the third call."""
        known: dict[tuple[Any, ...], Callable[..., Any] | bool] = {}

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is not None:  # a part of the call that is being recorded
                kwargs["_semantic"] = self.semantic
                return member(*args, **kwargs)
            key: list[Any] = []
            handles: list[Any] = []
            try:
                for arg in args:
                    if (
                        type(arg) is _Tensor and type(arg.handle) is _Handle
                    ):  # as _note() does, without the call
                        handle = arg.handle
                        key += (kind_of(arg.type), kind_of(handle.dtype))
                        handles.append(handle)
                    else:
                        _note(arg, key, handles)
                for name, arg in kwargs.items():
                    if name != "_semantic":
                        key.append(name)
                        _note(arg, key, handles)
            except Unknown:
                return plain(*args, **kwargs)
            if len(handles) > 1 and len(set(map(id, handles))) < len(handles):
                key.append(_same(handles))  # x * x says nothing of x * y
            which = tuple(key)
            found = known.get(which)
            if found is None:
                if self.entries < MOST_ENTRIES:
                    self.entries += 1
                    known[which] = True  # the next time is worth recording
                return plain(*args, **kwargs)
            if found is True:
                result, known[which] = self._record(member, args, kwargs, handles)
                return result
            return found(*handles) if found else plain(*args, **kwargs)

        return call

    def _record(
        self, member: Callable[..., Any], args: Any, kwargs: dict[str, Any], handles: list[Any]
    ) -> tuple[Any, Callable[..., Any] | bool]:
        """The result of one call, and the function that replays it, or False."""
        recorder = self.recorder = Recorder(self.builder, handles)
        self.semantic = TritonSemantic(recorder)
        try:
            result = member(*args, **{**kwargs, "_semantic": self.semantic})
        finally:
            self.recorder = self.semantic = None
        if not recorder.usable or not (result is None or type(result) is _Tensor):
            return result, False
        try:
            return result, _Writer(recorder, result).function()
        except Unknown:
            return result, False

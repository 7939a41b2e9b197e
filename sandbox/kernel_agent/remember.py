"""What Triton's semantic layer asks of its builder, written down once for each kind of operands and repeated.

For `a + b` that layer checks, promotes and broadcasts types, which costs many times what the operation does.
Those checks see types, numbers and constants, never elements, as in the compiler: for operands of the same
kinds it asks the builder for the same. The second call with operands of some kinds writes down what was
asked; later ones do only that, on their own operands, with the same functions and so the same bits. What
cannot be written down (a decision was taken on elements, a value of an unknown kind, a handle that the
builder did not make) is evaluated as before, each time.

`Calls`, `Recorder` and `Writer` serve any builder; `Memory` is the interpreter's, for NumPy.
torch_tl/repeat.py has torch's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as _interp

from . import rows

MOST_ENTRIES = 20_000  # a kernel whose numbers never repeat must not fill the memory
SEEN = object()  # a call with operands of these kinds: the next one is worth writing down
_CONSTANT = (
    "get_", "create_splat", "create_broadcast", "create_expand_dims", "create_make_range", "create_int_cast",
)  # fmt: skip
_SIMPLE = (bool, str, bytes, type(None), torch.dtype)
_TUPLES = (tuple, list, tl.core.tuple)

_Handle = _interp.TensorHandle
_Tensor = tl.tensor
_kinds: dict[Any, object] = {}
_codes: dict[str, types.CodeType] = {}


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


def note(value: Any, key: list[Any], tensors: list[Any]) -> None:
    """Add a value to the key of a call: its kind if it is a tensor, else itself. Tensors also go to
    `tensors`.

    Raises Unknown."""
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
    elif what is complex:
        key += (what, repr(value))
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


def key_of(which: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What calls with equal keys have in common; this one's tensors, and their handles. Raises Unknown."""
    key, tensors = [which], []
    handles = []
    for arg in args:
        if type(arg) is _Tensor:  # as note() does, without the call
            key.append(kind_of(arg.type))
            tensors.append(arg)
            handles.append(arg.handle)
        else:
            note(arg, key, tensors)
    for name, arg in kwargs.items():
        if name != "_semantic":
            key.append(name)
            note(arg, key, tensors)
    if len(handles) < len(tensors):
        handles = [tensor.handle for tensor in tensors]
    count = len(handles)
    if count > 1 and (handles[0] is handles[1] or (count > 2 and len(set(map(id, handles))) < count)):
        ids = list(map(id, handles))
        key.append(tuple(map(ids.index, ids)))  # x * x says nothing of x * y
    return key, tensors, handles


class Recorder:
    """A builder that does what the real one does, and writes down what it was asked for.

    `steps` are (method, arguments, slot of the result, or slots of several). `own` are the types of its
    handles; `constant` says of which methods the result holds for any operands."""

    def __init__(
        self, builder: Any, handles: list[Any], own: tuple[type, ...], constant: Callable[[str], bool]
    ) -> None:
        self._builder, self._own, self._constant = builder, own, constant
        self.handles = list(handles)
        self._slots = {id(handle): slot for slot, handle in enumerate(handles)}
        self.inputs = len(handles)
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
            if not all(isinstance(handle, self._own) for handle in handles):
                self.usable = False
                return made
            if not several and id(made) in self._slots:
                if not self._constant(name):
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


class Writer:
    """Makes a function of a recorder's steps: slot n is `h<n>` in its text."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.scope: dict[str, Any] = {}
        self.lines: list[str] = []

    def _bind(self, value: Any) -> str:
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def _slot(self, handle: Any) -> int:
        slot = self.recorder.slot(handle)
        if slot is None:
            raise Unknown
        return slot

    def _function(self, parameters: str) -> Callable[..., Any]:
        text = f"def replay({parameters}):\n    " + "\n    ".join(self.lines) + "\n"
        code = _codes.get(text)
        if code is None:
            code = _codes[text] = compile(text, "<remembered>", "exec")
        exec(code, self.scope)  # noqa: S102
        return self.scope["replay"]


class Calls:
    """What is written down of calls: nothing yet, SEEN, a function that repeats them, or False."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Any] = {}
        self.recorder: Recorder | None = None

    def looked_at_elements(self) -> None:
        """A decision is taken on the value of a tensor: what comes after it holds for this call only."""
        if self.recorder is not None:
            self.recorder.usable = False

    def seen(self, key: tuple[Any, ...]) -> None:
        """A call with a key of which nothing is known was evaluated."""
        if key not in self.known and len(self.known) < MOST_ENTRIES:
            self.known[key] = SEEN

    def record(
        self,
        key: tuple[Any, ...],
        recorder: Recorder,
        evaluate: Callable[[], Any],
        write: Callable[[Any], Callable[..., Any]],
    ) -> Any:
        """The result of one call, which is written down."""
        self.recorder = recorder
        try:
            result = evaluate()
        finally:
            self.recorder = None
        self.known[key] = False
        if recorder.usable:
            with contextlib.suppress(Unknown):
                self.known[key] = write(result)
        return result


def like(tensor: Any) -> Callable[[Any], Any]:
    """Makes tensors of the type of `tensor` around other handles."""
    template = {name: value for name, value in vars(tensor).items() if name != "handle"}

    def make(handle: Any) -> Any:
        made = object.__new__(_Tensor)
        made.__dict__ = {**template, "handle": handle}
        return made

    return make


# the interpreter's


class Watch(Protocol):
    """Told of each call that a kernel makes, in place of which it answers. While it evaluates one, `depth` is
    not 0."""

    depth: int

    def see(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def ask(self, kind: str, operands: list[Any]) -> int: ...
    def enter(self, fn: types.FunctionType) -> None: ...


class Memory(Calls):
    """What is remembered of one process. `builder` does the operations."""

    def __init__(self, builder: Any) -> None:
        super().__init__()
        self.builder = builder
        self.semantic: TritonSemantic | None = None
        self.watch: Watch | None = None  # of a kernel's calls: those that are not made inside of another

    def key(self, member: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The key of a call, and its handles. None: it cannot be remembered."""
        try:
            key, _, handles = key_of(member, args, kwargs)
            self.add_kinds(handles, key)
        except Unknown:
            return None, []
        return tuple(key), handles

    @staticmethod
    def add_kinds(handles: list[Any], key: list[Any]) -> None:
        """Add what is known of handles to a key. Raises Unknown."""
        for handle in handles:
            if type(handle) is not _Handle:
                raise Unknown
            key.append(kind_of(handle.dtype))

    def remembering(self, member: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """`plain` evaluates the builtin `member`; the result does so too, sooner from the third call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.watch is not None and self.watch.depth == 0:
                return self.watch.see(call, args, kwargs)
            if self.recorder is not None:  # a part of the call that is being recorded
                kwargs["_semantic"] = self.semantic
                return member(*args, **kwargs)
            which, handles = self.key(member, args, kwargs)
            if which is None:
                return plain(*args, **kwargs)
            found = self.known.get(which)
            if type(found) is types.FunctionType:
                return found(*handles)
            if found is SEEN:
                recorder = Recorder(self.builder, handles, (_Handle,), _is_constant)
                self.semantic = kwargs["_semantic"] = TritonSemantic(recorder)
                evaluate = functools.partial(member, *args, **kwargs)
                return self.record(which, recorder, evaluate, lambda made: _Writer(recorder, made).function())
            self.seen(which)
            return plain(*args, **kwargs)

        call.member = member  # type: ignore[attr-defined]
        return call

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, shown to who watches."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.watch is not None and self.watch.depth == 0:
                return self.watch.see(function, args, kwargs)
            return function(*args, **kwargs)

        return call


def _is_constant(name: str) -> bool:
    """Whether the result of a method depends on its operands alone, and is no question about the launch."""
    return name.startswith(_CONSTANT) and name != "create_get_program_id"


class _Writer(Writer):
    """Handles of the operands in, the result out."""

    def __init__(self, recorder: Recorder, result: Any) -> None:
        super().__init__(recorder)
        if not (result is None or type(result) is _Tensor):
            raise Unknown
        self.known: set[int] = set()  # slots that hold the same value in each call
        self.twins: dict[str, Any] = {}  # of the functions in the text, by their names in it (rows.py)
        output = None if result is None or result.handle is None else self._slot(result.handle)
        folding = self._folded(output)
        self.pure = True  # the calls do nothing but compute
        for name, args, made in recorder.steps:
            if made in folding if type(made) is int else False:
                self.known.add(made)
                continue
            self.pure &= _is_constant(name) or bool(_quick(recorder._builder, name, args))
            slots = [made] if type(made) is int else made
            left = ", ".join(f"h{slot}" for slot in slots) + (" = " if slots else "")
            self.lines.append(f"{left}{self._call(name, args)}")
        self.output = "None" if output is None else f"h{output}"
        self.returned = self._returned(result)

    def _folded(self, output: int | None) -> set[int]:
        """Slots made of constants alone. None where the result is one: calls must not share results."""
        folded: set[int] = set()
        for name, args, made in self.recorder.steps:
            used = [self.recorder.slot(arg) for arg in args if type(arg) is _Handle]
            if _is_constant(name) and type(made) is int and all(slot in folded for slot in used):
                folded.add(made)
        return set() if output in folded else folded

    def _argument(self, value: Any) -> str:
        if type(value) is _Handle:
            slot = self._slot(value)
            return self._bind(value) if slot in self.known else f"h{slot}"
        if type(value) in (list, tuple) and any(type(item) is _Handle for item in value):
            return "[" + ", ".join(self._argument(item) for item in value) + "]"
        if isinstance(value, (_Handle, _Tensor)) or type(value).__name__.endswith("Handle"):
            raise Unknown
        return self._bind(value)

    def _call(self, name: str, args: tuple[Any, ...]) -> str:
        builder = self.recorder._builder
        function, operands = _quick(builder, name, args) or (getattr(builder, name), args)
        bound = self._bind(function)
        self.twins[bound] = getattr(function, "twin", None) or _twin(builder, name, args)
        return f"{bound}({', '.join(self._argument(arg) for arg in operands)})"

    def _returned(self, result: Any) -> str:
        return "None" if result is None else f"{self._bind(like(result))}({self.output})"

    def function(self) -> Callable[..., Any]:
        """It has a `bare` one beside it that returns the handle, and says whether it is `pure`. The bare one
        has a `twin` for many programs, where all that it calls has one."""
        parameters = ", ".join(f"h{slot}" for slot in range(self.recorder.inputs))
        lines = self.lines
        self.lines = [*lines, f"return {self.output}"]
        bare = self._function(parameters)
        if None not in self.twins.values():
            scope = self.scope
            self.scope = {**scope, **self.twins}
            bare.twin = self._function(parameters)  # type: ignore[attr-defined]
            self.scope = scope
        self.lines = [*lines, f"return {self.returned}"]
        whole = self._function(parameters)
        whole.bare, whole.pure = bare, self.pure  # type: ignore[attr-defined]
        return whole


class _Probe:
    """Stands for a builder, to learn which NumPy function a method of it applies."""

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        return ("binary", op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return ("unary", op)

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return ("ternary", op)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return ("cast", dst_type)


def _quick(
    builder: Any, name: str, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """What a method of the builder does to plain handles, without detours: a function, and its arguments."""
    handles = [arg for arg in args if type(arg) is _Handle]
    method = getattr(type(builder), name, None)
    if method is None or method is not vars(_interp.InterpreterBuilder).get(name):
        return None
    if name == "create_splat":
        return _splat(tuple(args[0].shape), handles[0].dtype), args[1:]
    if any(handle.dtype.scalar == tl.bfloat16 for handle in handles):
        return None
    if name == "create_addptr":
        size = max(1, args[0].get_element_ty().primitive_bitwidth // 8)
        return _moved(size, args[0].dtype), args
    try:
        how, op = method(_Probe(), *args)
    except (AttributeError, TypeError, ValueError):
        return None
    if how == "binary" and len(handles) == 2:
        return _binary(op, handles[0].dtype.scalar), args
    if how == "ternary" and len(handles) == 3:
        return _ternary(op, handles[2].dtype.scalar), tuple(handles)  # clamp has one more: it is ignored
    if how == "unary" and len(handles) == 1:
        return _unary(op, handles[0].dtype.scalar), args
    if how == "cast" and op.scalar != tl.bfloat16:
        return _cast(_interp._get_np_dtype(op), op.scalar), args[:1]
    return None


def _twin(builder: Any, name: str, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What a method of the builder does for many programs (rows.py)."""
    found = rows.twin_of(builder, name)
    if found is not None:
        return found
    method = getattr(_interp.InterpreterBuilder, name, None)
    try:
        how = method is not None and isinstance(method(_Probe(), *args), tuple)
    except (AttributeError, TypeError, ValueError):
        return None
    return rows.elementwise(getattr(builder, name)) if how else None


def made(data: np.ndarray, dtype: Any) -> Any:
    """A handle, without asking again whether the array's elements fit the type."""
    handle = object.__new__(_Handle)
    handle.__dict__ = {"data": data, "dtype": dtype, "attr": {}}
    return handle


def _bytes(dtype: Any) -> float:
    """The most bytes that an element of an array of this type may have."""
    return np.inf if isinstance(dtype, tl.pointer_type) else max(8, dtype.primitive_bitwidth) // 8


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    function.twin = rows.elementwise(function)  # type: ignore[attr-defined]
    return function


def _binary(op: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    most = _bytes(dtype)

    def apply(lhs: Any, rhs: Any) -> Any:
        data = op(lhs.data, rhs.data)
        if data.itemsize > most:
            data = data.astype(_interp._get_np_dtype(dtype))
        return made(data, dtype)

    return _elementwise(apply)


def _ternary(op: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    most = _bytes(dtype)

    def apply(lhs: Any, rhs: Any, other: Any) -> Any:
        data = op(lhs.data, rhs.data, other.data)
        if data.itemsize > most:
            data = data.astype(_interp._get_np_dtype(dtype))
        return made(data, dtype)

    return _elementwise(apply)


def _unary(op: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    most = _bytes(dtype)

    def apply(arg: Any) -> Any:
        data = op(arg.data)
        return made(data, dtype) if data.itemsize <= most else _Handle(data, dtype)

    return _elementwise(apply)


def _splat(shape: tuple[int, ...], dtype: Any) -> Callable[..., Any]:
    element = _interp._get_np_dtype(dtype)
    scalar, several = dtype.scalar, isinstance(dtype, tl.block_type)

    def apply(arg: Any) -> Any:
        data = np.empty(shape, element)
        data[...] = arg.data[0] if several else arg.data
        return made(data, scalar)

    apply.twin = rows.splat(apply, shape, element, scalar)  # type: ignore[attr-defined]
    return apply


def _cast(element: np.dtype, dtype: Any) -> Callable[..., Any]:
    return _elementwise(lambda src: made(src.data.astype(element), dtype))


def _moved(size: int, dtype: Any) -> Callable[..., Any]:
    return _elementwise(lambda ptr, offset: made(ptr.data + size * offset.data.astype(np.uint64), dtype))

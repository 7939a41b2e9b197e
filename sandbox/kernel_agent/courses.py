"""The course that a kernel's programs take, learned from the Python of one and followed without it by others.

For small tiles the Python of a program takes many times what its operations do, and the programs of a kernel
make the same calls with the same kinds of operands, up to where an element decides: `if`, `while` and the
bounds of a loop ask for one. A *course* is a tree of *stretches*: calls one after another, then a question,
whose answer says which stretch is next. A program follows it as far as its answers are known. Where one is
not, or a call raises, the kernel's Python runs after all: each call is given what it made already, so that
nothing is done twice, and what is new from there on becomes part of the course.

What a call makes of constants is made once, and what it makes of arguments once a launch, where it does
nothing but compute. A step is what remember.py has written down for a call's operands, and else the call
itself.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from .remember import Memory, kind_of, like

MOST_CALLS = 12_000  # in a course; what comes after them is left to Python
MOST_COURSES = 64  # of a kernel
MOST_ANSWERS = 24  # to one question
MOST_BYTES = 64 << 20  # of what the calls of one program make: all of it is kept until the program ends
PATIENCE = 24  # programs that may leave the course, if no more reach its end

_Tensor = tl.tensor
_TUPLES = (tuple, list, tl.core.tuple)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FIXED = (*_PLAIN, slice, types.FunctionType, tl.dtype, tl.constexpr, JITFunction, TritonSemantic)
_LIBRARIES = ("triton", "torch", "numpy", "math", "kernel_agent", "builtins")
_AGAIN = object()  # in a log: a call whose result is its operand, or a constant

Values = list[Any]  # by slot: handles of tensors, and objects that are none
Function = Callable[..., Any]


class Lost(Exception):
    """What cannot be followed: an operand that no call made, a result that may depend on elements."""


class Otherwise(Exception):
    """A call made something of another kind than when it was written down."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made


@dataclass(frozen=True)
class Slot:
    number: int
    make: Callable[[Any], Any] | None = None  # the tensor around a handle; None: the value itself is meant
    element: Any = None  # the type of a tensor's elements


@dataclass(frozen=True)
class Said:
    """In a log: the answer to a question; or a result as it is."""

    value: Any


@dataclass
class _Call:
    """One call as its Python made it, with Slot in place of tensors. `key` is that of remember.py."""

    function: Function
    key: Any
    args: Any
    kwargs: dict[str, Any]
    slots: list[int]  # of its tensors, in the order of the key
    out: list[int]
    kind: Any  # of the result
    made: list[Any]  # the values in it, where they may be constant
    at: int  # in the log of its stretch


# How many handles a function takes that remember.py wrote down (-1: all values, as they are), the function,
# the slot of its result, the slots of one or two operands, or a list of them, and its place in the log.
Step = tuple[int, Function, int, Any, Any, int]


@dataclass(eq=False)
class Stretch:
    calls: list[_Call] = field(default_factory=list)  # until they are steps
    log: list[Any] = field(default_factory=list)  # what Python is given for its calls
    question: tuple[str, list[Any]] | None = None
    answers: dict[int, Stretch] = field(default_factory=dict)
    whole: bool = False  # a program ends here; without that and a question: Python goes on
    sealed: bool = False
    once: list[Step] = field(default_factory=list)  # for each launch
    steps: list[Step] = field(default_factory=list)  # for each program
    twins: list[Function | None] = field(default_factory=list)  # of the steps: for many programs (rows.py)
    made_once: list[int] = field(default_factory=list)  # slots
    constant: list[int] = field(default_factory=list)


class Course:
    """Of one kernel, for arguments of some kinds. The first slots are theirs, the next one is for nothing."""

    def __init__(self, memory: Memory, arguments: int) -> None:
        self.memory = memory
        self.first: Stretch | None = None
        self.before = 0  # programs that Python ran alone
        self.ended = self.left = 0  # programs that reached the end of the course, and that did not
        self.calls = 0
        self.bytes = 0  # that a program makes, as far as is known
        self.nothing, self.slots = arguments, arguments + 1
        self.constants: dict[int, Any] = {}
        self.unasked: set[int] = set()  # slots in which no argument has a part, that may be constant
        self.of_launch = set(range(arguments))
        self.names: dict[tuple[int, str], tuple[Any, Any]] = {}  # what its Python reads: where, and what
        self.functions: set[types.FunctionType] = set()
        self.usable = True

    def is_current(self) -> bool:
        """Whether all that the Python reads beside its arguments is what it was."""
        return all(_read(where, name) is value for (_, name), (where, value) in self.names.items())

    def is_promising(self) -> bool:
        return self.usable and self.left <= PATIENCE + self.ended

    def has_room(self) -> bool:
        return self.calls < MOST_CALLS

    def new_slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def read(self, fn: types.FunctionType) -> None:
        """Note what a function reads that is not an argument. What could change unseen is not followed."""
        if fn in self.functions:
            return
        self.functions.add(fn)
        names = tuple(_names_in(fn.__code__))
        for name in names:
            if name in fn.__globals__:
                self._read(fn.__globals__, name, names)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._read(cell, name, names)

    def _read(self, where: Any, name: str, attributes: tuple[str, ...]) -> None:
        value = _read(where, name)
        self.names[id(where), name] = where, value
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                for attribute in attributes:
                    if hasattr(value, attribute) and (id(value), attribute) not in self.names:
                        self._read(value, attribute, attributes)
        elif isinstance(value, tl.constexpr):
            self.names[id(value), "value"] = value, value.value
        elif not _is_fixed(value) and not callable(value):
            self.usable = False

    def seal(self, stretch: Stretch) -> None:
        """Calls become steps."""
        stretch.sealed = True
        for call in stretch.calls:
            found = self.memory.known.get(call.key) if call.key is not None else None
            bare = getattr(found, "bare", None)
            if bare is None and hasattr(call.function, "quick"):
                bare = call.function.quick(*call.args, **call.kwargs)
            pure = getattr(found or call.function, "pure", False) and len(call.out) == 1
            pure = pure and call.out[0] != self.nothing
            if pure and all(slot in self.constants for slot in call.slots):
                self.constants[call.out[0]] = call.made[0]
                stretch.constant.append(call.out[0])
                continue
            step: Step = -1, functools.partial(_called, call), self.nothing, None, None, call.at
            if bare is not None and len(call.out) < 2:
                out, count = (call.out or [self.nothing])[0], len(call.slots)
                one, other = (*call.slots, None, None)[:2]
                step = count, bare, out, one if 0 < count < 3 else call.slots, other, call.at
            if pure and all(slot in self.of_launch or slot in self.constants for slot in call.slots):
                self.of_launch.update(call.out)
                stretch.once.append(step)
                stretch.made_once += call.out
            else:
                stretch.steps.append(step)
                stretch.twins.append(getattr(bare, "twin", None))
            call.made = []
        stretch.calls = []


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:  # a comprehension's, say
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


def _called(call: _Call, values: Values) -> None:
    """A call that is not written down, on the values of another program."""
    made = call.function(*_filled(call.args, values), **_filled(call.kwargs, values))
    if _kind(made) != call.kind:
        raise Otherwise(made)
    for slot, value in zip(call.out, _values_of(made), strict=True):
        values[slot] = value


def _filled(value: Any, values: Values) -> Any:
    what = type(value)
    if what is Slot:
        held = values[value.number]
        return held if value.make is None else value.make(held)
    if what is Said:
        return value.value
    if what in _TUPLES:
        return what([_filled(item, values) for item in value])
    if what is dict:
        return {name: _filled(item, values) for name, item in value.items()}
    return value


def _slot(number: int, value: Any) -> Slot:
    """The place of a value. What a tensor is does not change: it is said once, however often it is taken."""
    return Slot(number, like(value), value.dtype) if type(value) is _Tensor else Slot(number)


def _values_of(made: Any) -> list[Any]:
    """What goes into slots, of a result."""
    if type(made) in _TUPLES:
        return [value for item in made for value in _values_of(item)]
    return [] if made is None else [made.handle if type(made) is _Tensor else made]


def _bytes_of(value: Any) -> int:
    found: int = getattr(getattr(value, "data", None), "nbytes", 0)
    return found


def _kind(made: Any) -> Any:
    if type(made) in _TUPLES:
        return tuple(_kind(item) for item in made)
    return kind_of(made.type) if type(made) is _Tensor else type(made)


def _is_fixed(value: Any) -> bool:
    return isinstance(value, _FIXED) or (type(value) is tuple and all(map(_is_fixed, value)))


def _read(where: Any, name: str) -> Any:
    if isinstance(where, dict):
        return where.get(name)
    return getattr(where, "cell_contents" if isinstance(where, types.CellType) else name, None)


def answer(kind: str, operands: list[Any]) -> int:
    """What a question is answered with; operands are handles and numbers."""
    numbers = [o if isinstance(o, int) else o.data.item() for o in operands]
    if kind == "bool":
        return bool(numbers[0])
    return int(numbers[0]) if kind == "index" else len(range(*map(int, numbers)))


class Walk:
    """One run of a kernel's Python: calls are given what is in `log`, what comes after it is evaluated, and
    written to the end of `stretch`, unless that is None."""

    def __init__(
        self, course: Course, arguments: list[Any], values: Values, log: list[Any], stretch: Stretch | None
    ) -> None:
        self.course, self.values, self.log, self.stretch = course, values, log, stretch
        self.at = 0
        self.depth = 0
        self.bytes = sum(map(_bytes_of, values))
        self.slot_of = {id(tensor): _slot(number, tensor) for number, tensor in enumerate(arguments)}
        self.kept: list[Any] = []  # what `slot_of` has is alive

    def enter(self, fn: types.FunctionType) -> None:
        """The Python of a kernel, or of what it calls, begins."""
        if self.stretch is not None:
            self.course.read(fn)

    def see(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that the kernel makes; not one inside of another."""
        new, key = self.at == len(self.log), None
        if not new:
            self.at += 1
            item = self.log[self.at - 1]
            if item is not _AGAIN:
                return self._given(item)
        recording = new and self.stretch is not None
        if recording and (member := getattr(function, "member", None)) is not None:
            key, _ = self.course.memory.key(member, args, kwargs)
        self.depth += 1
        try:
            made = function(*args, **kwargs)
        finally:
            self.depth -= 1
        if recording:
            try:
                self._write(function, key, args, kwargs, made)
            except Lost:
                self.stretch = None
        return made

    def ask(self, kind: str, operands: list[Any]) -> int:
        """A question of the kernel's Python; operands are tensors and numbers."""
        if self.at < len(self.log):
            self.at += 1
            said: int = self.log[self.at - 1].value
            return said
        found = answer(kind, [o.handle if type(o) is _Tensor else o for o in operands])
        if self.stretch is not None:
            try:
                self.stretch.question = kind, [self._noted(o, []) for o in operands]
                answers = self.stretch.answers
                answers[found] = self.stretch = Stretch()
            except Lost:
                self.stretch = None
        return found

    def end(self) -> None:
        if self.stretch is not None:
            self.stretch.whole = True
            self.course.bytes = max(self.course.bytes, self.bytes, 1)

    def _given(self, item: Any) -> Any:
        made = _filled(item, self.values)
        if self.stretch is not None:
            self._keep(item, made)
        return made

    def _keep(self, item: Any, made: Any) -> None:
        if type(item) is Slot:
            self.slot_of[id(made)] = item
            self.kept.append(made)
        elif type(item) in _TUPLES:
            for one, part in zip(item, made, strict=True):
                self._keep(one, part)

    def _write(self, function: Function, key: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        stretch, course = self.stretch, self.course
        assert stretch is not None
        slots: list[int] = []
        noted = self._noted(args, slots), self._noted(kwargs, slots)
        if type(made) is _Tensor and id(made) in self.slot_of:
            stretch.log.append(_AGAIN)
            return
        if isinstance(made, _FIXED) and made is not None:
            if slots:
                raise Lost
            stretch.log.append(_AGAIN)
            return
        out: list[int] = []
        item = self._result(made, out)
        if getattr(function, "pure", False) and (out or not slots) and {course.nothing}.issuperset(out):
            stretch.log.append(item)  # it made nothing of its own
            return
        values = []
        if course.unasked.issuperset(slots):
            course.unasked.update(out)
            values = _values_of(made)
        call = _Call(function, key, *noted, slots, out, _kind(made), values, len(stretch.log))
        stretch.calls.append(call)
        stretch.log.append(item)
        course.calls += 1
        if not course.has_room() or self.bytes > MOST_BYTES:
            self.stretch = None

    def _noted(self, value: Any, slots: list[int]) -> Any:
        what = type(value)
        if what in _TUPLES:
            return what([self._noted(item, slots) for item in value])
        if what is dict:
            return {name: self._noted(item, slots) for name, item in value.items() if name != "_semantic"}
        slot = self.slot_of.get(id(value))
        if slot is not None:
            if what is _Tensor:
                slots.append(slot.number)
            return slot
        if not isinstance(value, _FIXED) or isinstance(value, tl.constexpr) and not _is_fixed(value.value):
            raise Lost
        return value

    def _result(self, made: Any, out: list[int]) -> Any:
        """The result with slots in place of what it holds."""
        if made is None:
            return None
        if type(made) in _TUPLES:
            return type(made)([self._result(item, out) for item in made])
        slot = self.slot_of.get(id(made))
        if slot is None:
            slot = self.slot_of[id(made)] = _slot(self.course.new_slot(), made)
            self.kept.append(made)
            [value] = _values_of(made)
            self.values.append(value)
            self.bytes += _bytes_of(value)
            out.append(slot.number)
        else:
            out.append(self.course.nothing)  # it is there already: an operand, say, that needs no broadcast
        return slot

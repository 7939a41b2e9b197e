"""What rewritten kernels call: Triton's code generator in miniature, evaluating at once.

Compile-time values (constexpr parameters, literals, shapes) are plain Python values here; everything else is
a `tl.tensor` whose handle belongs to `Builder`. Where programs of a group disagree on an `if` or a loop's
bounds, they go apart and meet again (parting.py); anything else that needs one Python value asks
`Runtime.concrete`, which raises `Diverged` when they disagree.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from kernel_agent.remember import like
from kernel_agent.source import words
from kernel_agent.torch_tl import reductions
from kernel_agent.torch_tl.builder import Builder, blocks_of, flipped
from kernel_agent.torch_tl.handles import Constant, Diverged, Handle, KernelError
from kernel_agent.torch_tl.instrument import rewritten
from kernel_agent.torch_tl.memory import Memory
from kernel_agent.torch_tl.parting import Names, Ragged, Rounds, Sides, Turns
from kernel_agent.torch_tl.repeat import repeats_of

unwrap = tl.core._unwrap_if_constexpr
JITTED = (JITFunction, InterpretedFunction)
REFLECTED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {name: getattr(operator, name) for name in REFLECTED}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(operator, name)
        for name in words("add sub mul truediv floordiv mod pow lshift rshift xor matmul")
    },
    "and": operator.and_,
    "or": operator.or_,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert")},
    "not": operator.not_,
}
# Members of tl.tensor that are written in Triton themselves: x.sum(0) is tl.sum(x, 0).
STANDARD_MEMBERS = {
    name: function
    for name, function in vars(tl.standard).items()
    if isinstance(function, JITTED) and hasattr(tl.tensor, name)
}
IGNORED = ("static_print", "device_print", "device_assert", "debug_barrier", "assume")
HINTS = ("multiple_of", "max_contiguous", "max_constancy")


class Semantic(TritonSemantic):
    """Triton's semantic layer where an operation needs more than a builder: reductions, float atomics."""

    def __init__(self, builder: Builder, runtime: Runtime) -> None:
        super().__init__(builder)
        self.runtime = runtime

    def reduction(self, inputs: Any, axis: int | None, region: Callable[..., Any]) -> tuple[tl.tensor, ...]:
        if axis is None:
            inputs = tuple(self.reshape(t, [t.numel.value], can_reorder=True) for t in inputs)
            axis = 0
        function = inspect.getclosurevars(region).nonlocals["combine_fn"]
        name, handles = standard_name(function), [t.handle for t in inputs]
        if reductions.reduces(name):
            results = self.builder.reduced(name, axis + 1, handles)
        else:
            self.runtime.repeats.looked_at_elements()
            combine = self._combiner(function, inputs)
            data = reductions.reduce_pairwise(blocks_of(handles), axis + 1, combine)
            results = tuple(map(Handle, data))
        shape = [size for at, size in enumerate(inputs[0].type.shape) if at != axis]
        return self._wrapped_all(results, inputs, shape)

    def associative_scan(
        self, inputs: Any, axis: int, region: Callable[..., Any], reverse: bool
    ) -> tuple[tl.tensor, ...]:
        rank = len(inputs[0].type.shape)
        axis = axis + rank if axis < 0 else axis
        function = inspect.getclosurevars(region).nonlocals["combine_fn"]
        name, handles = standard_name(function), [t.handle for t in inputs]
        if reductions.scans(name):
            results = self.builder.scanned(name, axis + 1, handles, bool(unwrap(reverse)))
        else:
            self.runtime.repeats.looked_at_elements()
            combine = self._combiner(function, inputs)
            blocks = flipped(blocks_of(handles), axis + 1, reverse)
            data = reductions.scan_pairwise(blocks, axis + 1, combine)
            results = tuple(map(Handle, flipped(data, axis + 1, reverse)))
        return self._wrapped_all(results, inputs, inputs[0].type.shape)

    def _wrapped_all(self, handles: Iterable[Handle], inputs: Any, shape: Any) -> tuple[tl.tensor, ...]:
        pairs = zip(handles, inputs, strict=True)
        return tuple(self._wrapped(handle, t.type.scalar, shape) for handle, t in pairs)

    def _wrapped(self, handle: Handle, scalar: tl.dtype, shape: Any) -> tl.tensor:
        return tl.tensor(handle, tl.block_type(scalar, list(shape)) if len(shape) else scalar)

    def _combiner(self, function: Any, inputs: Any) -> reductions.Combine:
        scalars = [t.type.scalar for t in inputs]

        def combine(left: reductions.Blocks, right: reductions.Blocks) -> reductions.Blocks:
            shape = left[0].shape
            sides = zip(left + right, scalars * 2, strict=True)
            results = self.runtime.call(function, *(tl.tensor(Handle(d.reshape(-1)), ty) for d, ty in sides))
            results = results if isinstance(results, (tuple, tl.tuple)) else (results,)
            pairs = zip(results, scalars, strict=True)
            made = [self.cast(self.to_tensor(unwrap(r)), ty).handle.data for r, ty in pairs]
            return [data.expand(left[0].numel()).reshape(shape) for data in made]

        return combine

    def atomic_max(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> tl.tensor:
        return self._atomic_extreme("max", ptr, val, mask)

    def atomic_min(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> tl.tensor:
        return self._atomic_extreme("min", ptr, val, mask)

    def _atomic_extreme(self, update: str, ptr: Any, val: Any, mask: Any) -> tl.tensor:
        ptr, val, mask = self.atom_red_typechecking_impl(ptr, val, mask, update)
        if val.type.scalar.is_int_unsigned():
            message = f"atomic_{update} on unsigned integers is not supported"
            raise KernelError(message, remedy="use a signed tensor")
        return self.tensor(self.builder.atomic(update, ptr.handle, val.handle, mask.handle), val.type)


def standard_name(function: Any) -> str:
    """The name of a combine function that belongs to Triton's standard library, else an empty string."""
    plain = getattr(function, "fn", function)
    return plain.__name__ if plain.__module__ == tl.standard.__name__ else ""


@dataclass
class Method:
    """A bound function that is written in Triton."""

    owner: Any
    function: Any


class Runtime:
    """One launch's evaluation state. Rewritten code reaches it as `__ka__`."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.builder = Builder(memory)
        self.semantic = Semantic(self.builder, self)
        self.repeats = repeats_of(memory)
        self._ways: dict[int, tuple[Any, Callable[[Any, Any, Any], Any]]] = {}  # the first keeps the id
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._accepts: dict[Any, tuple[bool, bool]] = {}
        self._special: dict[Any, Callable[..., Any]] = {
            builtins.range: self._range,
            tl.range: self._range,
            tl.static_range: self._static_range,
            tl.static_assert: self._static_assert,
            builtins.min: tl.core.builtin_min,
            builtins.max: tl.core.builtin_max,
            builtins.print: self._ignore,
            tl.condition: lambda value, **hints: value,
            tl.standard.sort: self._sort,
            tl.standard.topk: self._topk,
            tl.standard.sort_impl: self._sort_impl,
            tl.standard.flip: self._flip,
            tl.standard.sigmoid: self._sigmoid,
            **{getattr(tl, name): self._ignore for name in IGNORED},
            **{getattr(tl, name): lambda x, values: x for name in HINTS},
        }

    # ---- values that decide control flow

    def concrete(self, value: Any) -> Any:
        """The Python value of a scalar on which all programs of the group agree."""
        told = self._told(value)
        if isinstance(told, torch.Tensor):
            raise Diverged(told)
        return told

    def _told(self, value: Any) -> Any:
        """The Python value of a scalar, or what the programs have, on the CPU, where that is not one."""
        value = unwrap(value)
        if not isinstance(value, tl.tensor):
            return value
        self.repeats.looked_at_elements()
        data = value.handle.data
        if isinstance(value.handle, Constant) and data.numel() == 1:
            return value.handle.value
        if data[0].numel() != 1:
            message = "a block decides a branch or a loop bound"
            raise KernelError(message, remedy="reduce it to a scalar, or use tl.where")
        data = data.detach().reshape(-1).cpu()
        if data.numel() == 1 or not bool((data != data[0]).any()):
            return data[0].item()
        if data.numel() != self.memory.programs.numel():
            raise KernelError("a combine function branches on its arguments", remedy="use tl.where in it")
        return data

    def truth(self, value: Any) -> bool:
        return bool(self.concrete(self._as_condition(value)))

    def decided(self, value: Any) -> bool | torch.Tensor:
        """What a condition is, for each program where they disagree."""
        told = self._told(self._as_condition(value))
        return told if isinstance(told, torch.Tensor) else bool(told)

    def _as_condition(self, value: Any) -> Any:
        if isinstance(value, tl.tensor) and value.handle.data.dtype != torch.bool:
            return self.compare("ne", value, 0)
        return value

    # ---- where programs part (parting.py)

    def rounds(self, names: Any) -> Rounds:
        return Rounds(self.memory, Names(*names))

    def sides(self, names: Any, decided: bool | torch.Tensor) -> Sides:
        return Sides(self.memory, Names(*names), decided)

    def turns(self, names: Any, values: Any) -> Turns:
        return Turns(self.memory, Names(*names), values)

    def same_turns(self, values: Any) -> Any:
        """What a loop goes over in which no programs can part."""
        if isinstance(values, Ragged):
            raise Diverged(values.keys(self.memory.programs.numel()))
        return values

    def _range(self, *bounds: Any, step: Any = None, **hints: Any) -> Iterable[tl.tensor] | Ragged:
        bounds = tuple(unwrap(bound) for bound in bounds)
        start, stop = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        step = bounds[2] if len(bounds) > 2 else (1 if step is None else unwrap(step))
        kinds = [bound.type.scalar for bound in (start, stop, step) if isinstance(bound, tl.tensor)]
        wide = any(kind.int_bitwidth == 64 for kind in kinds)
        kind = tl.int64 if wide else tl.int32
        builder, dtype = self.semantic.builder, torch.int64 if wide else torch.int32
        scalar = like(self.semantic.scalar_constant(0, kind))

        def variable(value: int | torch.Tensor) -> tl.tensor:
            if isinstance(value, int):
                return scalar(builder.constant(value, dtype))
            return scalar(Handle(value.to(builder.device, dtype)))

        first, last, by = self._told(start), self._told(stop), int(self.concrete(step))
        if isinstance(first, torch.Tensor) or isinstance(last, torch.Tensor):
            sides = [side.long() if isinstance(side, torch.Tensor) else int(side) for side in (first, last)]
            return Ragged(sides[0], sides[1], by, variable)
        return (variable(value) for value in range(int(first), int(last), by))

    def _static_range(self, *bounds: Any, step: Any = None) -> range:
        values = [int(self.concrete(bound)) for bound in bounds]
        if step is not None:
            values = [0, *values] if len(values) == 1 else values
            values.append(int(unwrap(step)))
        return range(*values)

    # ---- calls

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        if type(function) is MethodType and type(function.__self__) is tl.tensor:
            args, function = (function.__self__, *args), function.__func__
        else:
            function = unwrap(function)
            if isinstance(function, Method):
                args, function = (function.owner, *args), function.function
        known = self._ways.get(id(function))
        if known is not None:
            return known[1](function, args, kwargs)
        way = self._way(function)
        if type(function) is not MethodType:  # of which there is another one each time
            self._ways[id(function)] = function, way
        return way(function, args, kwargs)

    def _way(self, function: Any) -> Callable[[Any, Any, Any], Any]:
        """How a function is called, which never changes: a method for it, its arguments and its keywords."""
        if self._find_special(function) is not None:
            return self._call_special
        if isinstance(function, JITTED):
            of_triton = function.fn.__module__.partition(".")[0] == "triton"
            return self._call_standard if of_triton else self.call_jitted
        if isinstance(function, ConstexprFunction):
            return self._call_constexpr
        if tl.core.is_builtin(cuda_libdevice(function)):
            return self._call_builtin
        return self._call_python

    def _call_special(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        special = self._special[function]
        if tl.core.is_builtin(special):
            return self._call_builtin(special, args, kwargs)
        return unwrap(special(*args, **kwargs))

    def _call_standard(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.repeats.ask(self.semantic, function.fn, self._evaluate, args, kwargs)

    def _call_constexpr(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function.fn(*map(unwrap, args), **{name: unwrap(value) for name, value in kwargs.items()})

    def _call_builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.repeats.ask(self.semantic, function, self._builtin, args, kwargs)

    def _builtin(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = cuda_libdevice(function)
        takes_semantic, takes_generator = self._signature(function)
        given = dict(kwargs)
        if takes_semantic:
            given["_semantic"] = self.semantic
        if takes_generator:
            given["_generator"] = self
        return unwrap(function(*args, **given))

    def _call_python(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(unwrap(arg) for arg in args)
        if any(isinstance(arg, tl.tensor) for arg in args) and function in (int, float, bool):
            raise KernelError(f"{function.__name__}() of a runtime value", remedy="use .to(dtype)")
        return unwrap(function(*args, **kwargs))

    def call_jitted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function written in Triton. Numbers that it returns become scalars, as in compiled code."""
        return self._evaluate(function.fn, args, kwargs)

    def _evaluate(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._functions.get(plain)
        if target is None:
            target = self._functions[plain] = rewritten(plain, self)
        given = {name: unwrap(value) for name, value in kwargs.items()}
        return self.decay(target(*map(unwrap, args), **given))

    def decay(self, value: Any) -> Any:
        if isinstance(value, (tuple, tl.tuple)) and not hasattr(type(value), "_fields"):
            return tuple(self.decay(item) for item in value)
        value = unwrap(value)
        return self.semantic.to_tensor(value) if isinstance(value, (bool, int, float)) else value

    def _find_special(self, function: Any) -> Callable[..., Any] | None:
        try:
            return self._special.get(function)
        except TypeError:
            return None

    def _signature(self, function: Any) -> tuple[bool, bool]:
        key = getattr(function, "__func__", function)
        if key not in self._accepts:
            names = inspect.signature(function).parameters
            self._accepts[key] = ("_semantic" in names, "_generator" in names)
        return self._accepts[key]

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _static_assert(self, condition: Any, message: Any = "") -> None:
        if not self.truth(condition):
            raise KernelError(f"static_assert failed: {unwrap(message)}", kind="stub_raised")

    def _sort_impl(self, x: tl.tensor, k: Any = None, dim: Any = None, descending: Any = False) -> tl.tensor:
        axis = len(x.shape) - 1 if dim is None else dim
        keep = x.type.shape[axis] if k is None else k
        data = reductions.sort(x.handle.data, axis + 1, bool(descending), keep)
        return self.semantic._wrapped(Handle(data), x.type.scalar, data.shape[1:])

    def _sort(self, x: tl.tensor, dim: Any = None, descending: Any = False) -> tl.tensor:
        return self._sort_impl(x, dim=unwrap(dim), descending=unwrap(descending))

    def _topk(self, x: tl.tensor, k: Any, dim: Any = None) -> tl.tensor:
        return self._sort_impl(x, k=unwrap(k), dim=unwrap(dim), descending=True)

    def _flip(self, x: tl.tensor, dim: Any = None) -> tl.tensor:
        axis = len(x.shape) - 1 if dim is None else unwrap(dim) % len(x.shape)
        return tl.tensor(Handle(x.handle.data.flip(axis + 1)), x.type)

    def _sigmoid(self, x: Any) -> tl.tensor:
        """By torch's function, of which the derivative is a number far out, where that of its formula,
        1 / (1 + exp(-x)), is none."""
        if not isinstance(x, tl.tensor) or x.type.scalar not in (tl.float32, tl.float64):
            return self._call_standard(tl.standard.sigmoid, (x,), {})
        return tl.tensor(Handle(torch.sigmoid(x.handle.data)), x.type)

    # ---- expressions and statements

    def attribute(self, value: Any, name: str) -> Any:
        if isinstance(value, tl.constexpr):
            value = value.value
        if isinstance(value, tl.tensor):
            if name == "T":
                return self.repeats.ask(self.semantic, "T", self._transposed, (value,))
            if name in STANDARD_MEMBERS:
                return Method(value, STANDARD_MEMBERS[name])
        elif name == "value" and not hasattr(value, "value"):
            return value
        if isinstance(value, ModuleType):
            return getattr(value, name)
        return unwrap(getattr(value, name))

    def index(self, value: Any, key: Any) -> Any:
        value = unwrap(value)
        if isinstance(value, tl.tensor):
            keys = key if isinstance(key, tuple) else [key]
            return self.repeats.ask(self.semantic, "getitem", self._member, (value, keys))
        if isinstance(key, tl.tensor):
            key = self.concrete(key)
        return unwrap(value[unwrap(key)])

    def slice(self, start: Any, stop: Any, step: Any) -> builtins.slice:
        return builtins.slice(unwrap(start), unwrap(stop), unwrap(step))

    def binary(self, name: str, a: Any, b: Any) -> Any:
        a, b = plain_value(a), plain_value(b)
        if isinstance(a, tl.tensor) or isinstance(b, tl.tensor):
            return self.repeats.ask(self.semantic, name, self._binary, (a, b))
        return unwrap(ARITHMETIC[name](a, b))

    def _binary(self, name: str, sides: tuple[Any, Any], _: Any) -> Any:
        a, b = sides
        if isinstance(a, tl.tensor):
            return getattr(a, f"__{name}__")(b, _semantic=self.semantic)
        return getattr(b, f"__{REFLECTED.get(name, 'r' + name)}__")(a, _semantic=self.semantic)

    def compare(self, name: str, a: Any, b: Any) -> Any:
        a, b = plain_value(a), plain_value(b)
        if (isinstance(a, tl.tensor) and b is not None) or (isinstance(b, tl.tensor) and a is not None):
            return self.repeats.ask(self.semantic, name, self._binary, (a, b))
        return unwrap(COMPARE[name](a, b))

    def _member(self, name: str, args: tuple[Any, ...], _: Any) -> Any:
        """A special method of the first of `args`."""
        return getattr(args[0], f"__{name}__")(*args[1:], _semantic=self.semantic)

    def _transposed(self, name: str, args: tuple[Any, ...], _: Any) -> Any:
        return self.semantic.permute(args[0], (1, 0))

    def _method(self, name: str, args: tuple[Any, ...], _: Any) -> Any:
        return getattr(self.semantic, name)(*args)

    def identical(self, a: Any, b: Any) -> bool:
        return unwrap(a) is unwrap(b)

    def unary(self, name: str, value: Any) -> Any:
        value = unwrap(value)
        if not isinstance(value, tl.tensor):
            return unwrap(UNARY[name](value))
        if name == "not":
            return self.repeats.ask(self.semantic, "not_", self._method, (value,))
        return value if name == "pos" else self.repeats.ask(self.semantic, name, self._member, (value,))

    def logical(self, kind: str, *parts: Callable[[], Any]) -> Any:
        """`and` or `or`: short-circuits on compile-time values, combines runtime ones."""
        result: Any = None
        for part in parts:
            value = unwrap(part())
            if isinstance(value, tl.tensor):
                if isinstance(result, tl.tensor):
                    value = self.repeats.ask(self.semantic, f"logical_{kind}", self._method, (result, value))
                result = value
            elif bool(value) is (kind == "or"):
                return value
            elif not isinstance(result, tl.tensor):
                result = value
        return result

    def assign(self, value: Any) -> Any:
        """A variable that is not annotated as constexpr becomes a runtime value, as in compiled code."""
        if isinstance(value, (tuple, list, tl.tuple)) and not hasattr(type(value), "_fields"):
            return tuple(self.assign(item) for item in value)
        value = unwrap(value)
        return self.semantic.to_tensor(value) if isinstance(value, (bool, int, float)) else value

    def constant(self, value: Any) -> Any:
        return unwrap(value)

    def check(self, condition: Any, message: str = "") -> None:
        if not isinstance(unwrap(condition), tl.tensor) and not unwrap(condition):
            raise KernelError(f"assertion failed: {message}", kind="stub_raised")


def plain_value(value: Any) -> Any:
    """unwrap(), sooner for what is most frequent."""
    return value if type(value) is tl.tensor else unwrap(value)


def cuda_libdevice(function: Any) -> Any:
    """The CUDA implementation of a function that `triton.language.extra.libdevice` only declares."""
    if getattr(function, "__module__", "") != "triton.language.extra.libdevice":
        return function
    from triton.language.extra.cuda import libdevice

    return getattr(libdevice, function.__name__, function)

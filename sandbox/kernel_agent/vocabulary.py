"""What a kernel may name and be given: a closed list.

Interpreted, a kernel is a Python function, and compiled, its constexprs are evaluated by Python too: a
callable that is passed to it, or that it finds in its module, would run as host code inside the launch.
Allowed are jitted functions (which are looked at in turn), functions marked as constexpr_function, what
triton.language has, a few builtins, and constants: numbers, bools, None, strings, dtypes, and tuples of
those. Names are looked up anew for each launch: a module may bind them to something else in between.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import jit
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from .source import tree_nodes, words

_BUILTINS = words(
    """range len min max abs sum float int bool str tuple list isinstance hasattr print repr zip enumerate
    super NotImplementedError"""
)
_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_CONSTEXPR_FUNCTIONS = tuple(
    found for name in ("ConstexprFunction", "BoundConstexprFunction") if (found := getattr(jit, name, None))
)
_HOST_FUNCTIONS = (triton.cdiv, triton.next_power_of_2)  # plain functions in older versions
_ATOMICS = words("atomic_add atomic_max atomic_min atomic_and atomic_or atomic_xor atomic_xchg atomic_cas")
_REMEDY = (
    "a kernel uses triton.language, jitted functions, and constants: numbers, bools, None, strings, dtypes"
)


@dataclass
class Words:
    """What the source of one jitted function says. Names are dotted, with their lines."""

    names: dict[str, int] = field(default_factory=dict)
    ordering: bool = False  # results of atomics are used, or loads are volatile


def ordering(kernel: JITFunction, args: Mapping[str, Any]) -> bool:
    """Whether its programs may wait for each other: results of atomics are used, also in what it calls."""
    return any(_words(function).ordering for function in _reached(kernel, args))


def problems(kernel: JITFunction, args: Mapping[str, Any], own: Callable[[Any], bool]) -> list[str]:
    """A sentence for each thing that the kernel is given, or names, and may not use. Names are those of
    functions of which `own(fn)` holds."""
    found = []
    line = _first_line(kernel.fn)
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    for name, value in args.items():
        if not (_is_constant(value, memory=name not in constexprs) or _is_callable(value)):
            found.append(
                f"line {line}: {kernel.fn.__name__} is given {_described(value)} as {name}: {_REMEDY}"
            )
    for function in filter(lambda reached: own(reached.fn), _reached(kernel, args)):
        for name, (value, line) in _named(function).items():
            if not (_is_constant(value) or _is_callable(value) or _is_module(value)):
                found.append(
                    f"line {line}: {function.fn.__name__} uses {name}, which is {_described(value)}: "
                    + _REMEDY
                )
        for value in (*(function.fn.__defaults__ or ()), *(function.fn.__kwdefaults__ or {}).values()):
            if not (_is_constant(value) or _is_callable(value)):
                what = f"has {_described(value)} as a default"
                found.append(f"line {_first_line(function.fn)}: {function.fn.__name__} {what}: {_REMEDY}")
    return found


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor (as a constexpr or a name)"
    if isinstance(
        value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
    ):
        return f"the host function {getattr(value, '__qualname__', 'partial')}"
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}"
    return f"of type {type(value).__qualname__}"


# ---- kinds of values


def _is_constant(value: Any, memory: bool = False) -> bool:
    """`memory`: or a tensor, as kernels get it."""
    if type(value) in _CONSTANTS or isinstance(value, (tl.dtype, np.generic)):
        return True
    if type(value) is tl.constexpr:
        return _is_constant(value.value) or _is_callable(value.value)
    if type(value) in (tuple, list, torch.Size, getattr(tl, "tuple", tuple)) or _is_plain_record(value):
        return all(_is_constant(item, memory) or _is_callable(item) for item in value)
    return memory and _is_memory(value)


def _is_plain_record(value: Any) -> bool:
    """A namedtuple without code of its own."""
    kind = type(value)
    own = [name for name, member in vars(kind).items() if isinstance(member, (types.FunctionType, property))]
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and all(n.startswith("_") for n in own)


def _is_callable(value: Any) -> bool:
    """Jitted, or of triton.language."""
    if _jitted(value) is not None or isinstance(value, _CONSTEXPR_FUNCTIONS):
        return True
    if any(value is function for function in _HOST_FUNCTIONS):
        return True
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        name, module = str(value.__name__), value.__module__
        if getattr(builtins, name, None) is value:
            return name in _BUILTINS
        return _is_of_language(module) or module == "math"
    return isinstance(value, functools.partial) and _is_of_language(value.func.__module__)


def _is_of_language(module: str | None) -> bool:
    return f"{module}.".startswith(("triton.language.", "triton._C."))


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and (
        value in (triton, math) or _is_of_language(value.__name__)
    )


def _is_memory(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter, TensorWrapper) or isinstance(
        value, TensorDescriptor
    )


def _jitted(value: Any) -> JITFunction | None:
    return value if isinstance(value, JITFunction) and type(value).__module__.startswith("triton.") else None


# ---- what a source says


def _first_line(fn: Callable[..., Any]) -> int:
    return fn.__code__.co_firstlineno


def _reached(kernel: JITFunction, args: Mapping[str, Any]) -> list[JITFunction]:
    """The kernel, the jitted functions that it is given, and those that these name."""
    found: list[JITFunction] = []
    todo: list[Any] = [kernel, *_inside(args.values())]
    while todo:
        function = _jitted(todo.pop())
        if function is None or function in found or _is_of_language(function.fn.__module__):
            continue
        found.append(function)
        todo += _inside(value for value, _ in _named(function).values())
        todo += _inside(function.fn.__defaults__ or ())
    return found


def _inside(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) is tl.constexpr:
            yield value.value
        elif isinstance(value, (tuple, list)):
            yield from _inside(value)
        else:
            yield value


def _named(function: JITFunction) -> dict[str, tuple[Any, int]]:
    """The module's and the closure's names that a function uses, with what they mean now, and the line. Of
    dotted names below modules the whole."""
    fn = function.fn
    enclosed = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False))
    found = {}
    for dotted, line in _words(function).names.items():
        root, *rest = dotted.split(".")
        name = root
        if root in enclosed:
            value = enclosed[root].cell_contents
        elif root in fn.__globals__:
            value = fn.__globals__[root]
        elif hasattr(builtins, root):
            value = getattr(builtins, root)
        else:
            continue
        while rest and isinstance(value, types.ModuleType) and hasattr(value, rest[0]):
            value, name = getattr(value, rest[0]), f"{name}.{rest[0]}"
            rest = rest[1:]
        found[name] = (value, line)
    return found


def _words(function: JITFunction) -> Words:
    made = function.__dict__.get("_kernel_agent_words")
    if made is None:
        made = function.__dict__["_kernel_agent_words"] = _read(function.fn)
    return made


def _read(fn: types.FunctionType) -> Words:
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    made = Words()
    nodes = [node for statement in definition.body for node in tree_nodes(statement)]
    own = {arg.arg for arg in tree_nodes(definition.args) if isinstance(arg, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    part = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    unused = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        dotted = _dotted(node) if node not in part else None
        if dotted is not None and dotted.split(".")[0] not in own:
            made.names.setdefault(dotted, first - 1 + node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            volatile = name == "load" and any(k.arg == "volatile" for k in node.keywords)
            made.ordering |= volatile or (name in _ATOMICS and node not in unused)
    return made


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None

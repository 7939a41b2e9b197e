"""The Python of a kernel as the interpreter runs it: numbers are Triton's, and so are `and`, `or`, `not` and
the indices of loops."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from triton.runtime import interpreter as _interp
from triton.runtime.jit import JITFunction

from . import courses, remember

_TO_TENSOR = "__kernel_agent_to_tensor__"
_LOGICAL, _NOT, _TURNS = "__ka_logical__", "__ka_not__", "__ka_turns__"
_LIBDEVICE = ("triton.language.extra.cuda.libdevice", "triton.language.extra.libdevice")


@functools.cache
def memory() -> remember.Memory:
    """What this process remembers of calls."""
    return remember.Memory(_interp.interpreter_builder)


def rewritten(kernel: JITFunction) -> Callable[..., Any]:
    """The kernel's function with every assigned number made a Triton scalar, as the interpreter needs it."""
    function = kernel.__dict__.get("_kernel_agent_function")
    if function is None:
        function = _rewrite(kernel.fn)
        kernel.__dict__["_kernel_agent_function"] = function
    return function


class _AsCompiled(ast.NodeTransformer):
    """x = v becomes x = to_tensor(v): numbers carry a Triton type from their first assignment. `and`, `or`
    and `not` take tensors element by element, and all of their operands are evaluated. A loop from a tensor
    on counts in tensors."""

    def visit_For(self, node: ast.For) -> ast.For:
        self.generic_visit(node)
        call = node.iter
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("range"):
            turns = ast.Call(ast.Name(_TURNS, ast.Load()), [call.func, *call.args], call.keywords)
            node.iter = ast.copy_location(turns, call)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if len(node.targets) > 1:
            raise SyntaxError("Triton has no chained assignment (a = b = value)")
        self.generic_visit(node)
        callee = ast.Name(id=_TO_TENSOR, ctx=ast.Load())
        node.value = ast.Call(func=callee, args=[node.value], keywords=[])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.Call:
        self.generic_visit(node)
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        late = [ast.Lambda(none, value) for value in node.values]
        kind = ast.Constant("and" if isinstance(node.op, ast.And) else "or")
        return ast.copy_location(ast.Call(ast.Name(_LOGICAL, ast.Load()), [kind, *late], []), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(ast.Call(ast.Name(_NOT, ast.Load()), [node.operand], []), node)


def _rewrite(fn: types.FunctionType) -> Callable[..., Any]:
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    definition.returns = None
    tree = ast.fix_missing_locations(_AsCompiled().visit(tree))
    ast.increment_lineno(tree, first - 1)
    scope = _scope_of(fn)
    scope |= {_TO_TENSOR: _to_tensor, _LOGICAL: _logical, _NOT: _not, _TURNS: _turns}
    made: dict[str, Any] = {}
    code = compile(tree, inspect.getsourcefile(fn) or fn.__code__.co_filename, "exec", dont_inherit=True)
    exec(code, scope, made)  # noqa: S102
    return made[fn.__name__]


def _scope_of(fn: types.FunctionType) -> dict[str, Any]:
    """The globals that the rewritten function sees: the module's own, live, unless names must be replaced."""
    scope = fn.__globals__
    replaced = dict(inspect.getclosurevars(fn).nonlocals)
    for name in fn.__code__.co_names:
        value = scope.get(name)
        if not callable(value) or isinstance(value, types.ModuleType):
            continue
        if getattr(value, "__module__", "") in _LIBDEVICE:
            replaced[name] = _of_libdevice(value.__name__)
        elif tl.core.is_builtin(value):
            replaced[name] = _with_semantic(value)
    return {**scope, **replaced} if replaced else scope


def _of_libdevice(name: str) -> Callable[..., Any]:
    """A function of libdevice imported by name, which may be the one that only declares it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(libdevice()[0], name)(*args, **kwargs)

    return call


def _with_semantic(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """A builtin imported by name: it must reach what the interpreter puts in its place."""

    def call(*args: Any, **kwargs: Any) -> Any:
        target = getattr(tl.core, builtin.__name__, builtin)
        if target is builtin:
            kwargs["_semantic"] = _interp.interpreter_semantic
        return target(*args, **kwargs)

    return call


def _to_tensor(value: Any) -> Any:
    return value if type(value) is tl.tensor else _semantics().number(value)


def _logical(kind: str, *parts: Callable[[], Any]) -> Any:
    """As Triton compiles it: what is known then ends it or is left out, tensors are combined."""
    combine = getattr(_semantics(), f"logical_{kind}")
    result: Any = None
    for part in parts:
        value = part()
        if type(value) is tl.tensor:
            result = combine(result, value) if type(result) is tl.tensor else value
        elif bool(value) is (kind == "or"):
            return value
        elif type(result) is not tl.tensor:
            result = value
    return result


def _not(value: Any) -> Any:
    return _semantics().not_(value) if type(value) is tl.tensor else not value


def _turns(counting: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a loop over `range` runs through. As in compiled code its index is a tensor where its start or
    its step is one."""
    own = counting in (range, tl.range, tl.core.range)
    bounds = [args[0] if args else kwargs.get("arg1"), *args[1:3]]
    for name in ("arg2", "step")[len(bounds) - 1 :]:
        bounds.append(kwargs.get(name))
    if not own or all(type(bound) is not tl.tensor for bound in bounds):
        return counting(*args, **kwargs)
    first, last, step = (tl.core._unwrap_if_constexpr(bound) for bound in bounds)
    if last is None:
        first, last = 0, first
    step = 1 if step is None else step
    watch = memory().watch
    asked: list[Any] = [first, last, step]
    if watch is not None and watch.depth == 0:
        turns = watch.ask("turns", asked)
    else:
        memory().looked_at_elements()
        turns = courses.answer("turns", [v.handle if type(v) is tl.tensor else v for v in asked])
    if type(first) is tl.tensor or type(step) is tl.tensor:
        wide = any(getattr(bound, "dtype", None) == tl.int64 for bound in asked)
        return _counted(_widened(first), _widened(step), turns) if wide else _counted(first, step, turns)
    return range(first, first + turns * step, step)


def _widened(first: Any) -> Any:
    return (first if type(first) is tl.tensor else _to_tensor(first)).to(tl.int64)


def _counted(first: Any, step: Any, turns: int) -> Iterator[Any]:
    for turn in range(turns):
        yield first + turn * step


@dataclass
class _Semantics:
    """What a kernel has for Python's numbers, `and`, `or` and `not`: the semantic layer's, shown to who
    watches."""

    number: Callable[[Any], Any]
    logical_and: Callable[[Any, Any], Any]
    logical_or: Callable[[Any, Any], Any]
    not_: Callable[[Any], Any]


@functools.cache
def _semantics() -> _Semantics:
    def number(value: Any) -> Any:
        return _interp.interpreter_semantic.to_tensor(value, False)

    def of(name: str) -> Callable[..., Any]:
        def member(*operands: Any, _semantic: Any) -> Any:
            return getattr(_semantic, name)(*operands)

        def plain(*operands: Any, **_: Any) -> Any:
            return getattr(_interp.interpreter_semantic, name)(*operands)

        return memory().remembering(member, plain)

    number.pure = True  # type: ignore[attr-defined]
    return _Semantics(memory().watching(number), of("logical_and"), of("logical_or"), of("not_"))


def libdevice() -> list[types.ModuleType]:
    """The modules that hold libdevice: the CUDA one, and the one that the compiler maps to it."""
    return [importlib.import_module(name) for name in _LIBDEVICE]

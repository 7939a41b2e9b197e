"""What people call: the backward of a stub as text, a differentiable stub, and rules of their own."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

from .. import forward
from ..source import MARKER
from . import function
from .ir.nodes import FLOATS
from .pipeline import SCHEDULES, Draft, differentiate
from .read import language

AUTODIFF = """
def autodiff(inputs_require_grad=(), idxs_buffers=()):  # marks the stub for kernel-agent
    return lambda stub: stub
"""

# The product of sizes up to which a script on a CPU makes calls of others in SWEEP: those of models, which
# are meant for a GPU, would be drawn with gigabytes each.
ON_CPU = 1 << 20

Rule = Callable[[Any, Any, Any], Sequence[Any]]


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the adjoint of an operation by the name it is called with, also in place of a built-in one.

    The function gets the graph `g`, the node of the call (its arguments are `node.args`) and the adjoint `d`
    of the result, and returns one adjoint (or None) per argument, made with `g`:

        @rule("my_silu")
        def _(g, node, d):
            (x,) = node.args
            s = g.call("sigmoid", x)
            return (g.mul(d, g.mul(s, g.add(g.number(1.0), g.mul(x, g.sub(g.number(1.0), s))))),)

    The operation is taken to be elementwise. It is called in the backward as it was called in the forward.
    """

    if not isinstance(name, str):
        raise TypeError('@rule takes the name of the operation: @rule("my_op")')

    def register(function: Rule) -> Rule:
        language.USER_RULES[name] = function
        return function

    return register


def forget(name: str) -> None:
    """Undo `rule`. KeyError where there is none."""
    del language.USER_RULES[name]


@overload
def grad(stub: str | Path, dims: dict[str, Any] | None = None, **options: Any) -> Draft: ...
@overload
def grad(stub: Callable[..., Any], dims: dict[str, Any] | None = None, **options: Any) -> Any: ...
def grad(stub: Callable[..., Any] | str | Path, dims: dict[str, Any] | None = None, **options: Any) -> Any:
    """The backward of a marked stub (or of the path of its file) as a Draft; of a plain Triton function as a
    jit function.

    A stub is traced on `dims` or the first entry of SWEEP. `wrt` are names or positions of inputs, in place
    of those that the mark names; the other options are `seed`, `dtype`, `schedule`, `config`, `mode`,
    `target`, `device`. `draft.text` belongs under the marker in the forward file.

    A plain function takes values (blocks or scalars) and returns a value or a tuple of values; it need not be
    decorated. Then

        gelu_bwd = grad(gelu, wrt=("x",))

    is a `triton.jit` function to be called in a kernel: the parameters of `gelu`, one upstream for each
    returned value, then the constexpr parameters, which are passed by name; it returns the adjoints of `wrt`
    (all values by default) in that order, one value or a tuple, in float32 (float64 with `dtype="float64"`).
    `gelu_bwd.source` is its text. `shapes` says how values broadcast, `{"x": (16, 32), "w": (32,)}`: equal
    numbers are one size, 1 is stretched, `()` is a scalar; other sizes of the same pattern work too, another
    pattern fails to compile. Without it all values are blocks of one dimension and the same size. `dims` has
    the values of constexpr parameters on which shapes or axes depend. Integer values are not supported.

    Raises Refusal or errors.Unusable; TypeError and ValueError for arguments that make no sense.
    """
    if callable(stub) and _is_math(stub):
        return _of_function(stub, dims, **options)
    return _of_stub(stub, dims, **options)


def _is_math(given: Callable[..., Any]) -> bool:
    """Whether something is a jit function, or a function without a mark."""
    if hasattr(given, "fn"):
        return True
    plain = inspect.unwrap(given)
    if not inspect.isfunction(plain) or hasattr(plain, "__kernel_agent__"):
        return False
    if plain.__name__ == "<lambda>":
        raise TypeError("a function written with `def` in a file is expected, not a lambda")
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(plain))).body
    assert isinstance(definition, ast.FunctionDef)
    return not any("autodiff" in ast.unparse(decorator) for decorator in definition.decorator_list)


def _of_function(
    fn: Callable[..., Any],
    dims: dict[str, Any] | None = None,
    *,
    wrt: Sequence[int | str] | None = None,
    shapes: function.Shapes | None = None,
    dtype: str = "float32",
) -> Any:
    """The derivative of a plain function."""
    if dtype not in FLOATS:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(FLOATS)}")
    chosen = [wrt] if isinstance(wrt, (int, str)) else wrt
    return function.differentiate(fn, dims or {}, chosen, shapes, dtype)


def _of_stub(
    stub: Callable[..., Any] | str | Path,
    dims: dict[str, Any] | None = None,
    *,
    wrt: Sequence[int | str] | None = None,
    seed: int = 0,
    dtype: str | None = None,
    schedule: str | None = None,
    config: dict[str, Any] | None = None,
    mode: str = "interpret",
    target: str = "sm_90",
    device: str = "cpu",
) -> Draft:
    """The backward section of a marked stub."""
    if schedule not in (None, *SCHEDULES):
        raise ValueError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    fwd = forward.load(_file_of(stub), mode, target, device)
    if wrt is not None:
        fwd.grads = tuple(_parameter(fwd, one) for one in ([wrt] if isinstance(wrt, (int, str)) else wrt))
    sweep = fwd.sweep_cpu or fwd.sweep
    others = [shape.dims for shape in sweep if device != "cpu" or _elements(shape.dims) <= ON_CPU]
    return differentiate(fwd, dims or sweep[0].dims, seed, dtype, schedule, config, others)


def _elements(dims: dict[str, Any]) -> int:
    """The product of the sizes."""
    return math.prod(size for size in dims.values() if isinstance(size, int) and size > 0)


def _file_of(stub: Callable[..., Any] | str | Path) -> Path:
    """The file that a stub is written in."""
    if isinstance(stub, (str, Path)):
        return Path(stub)
    plain = inspect.unwrap(stub) if callable(stub) else stub
    if not inspect.isfunction(plain):
        given = f"{type(stub).__name__} {getattr(stub, '__name__', '')}".strip()
        raise TypeError(f"a function marked with @autodiff or the path of its file is expected, not {given}")
    return Path(inspect.getsourcefile(plain) or plain.__code__.co_filename)


def _parameter(fwd: forward.Forward, one: int | str) -> str:
    """An input by name or position."""
    names = [p.name for p in fwd.params]
    if isinstance(one, int) and not isinstance(one, bool) and 0 <= one < len(names):
        return names[one]
    if one not in names:
        raise ValueError(f"wrt: {fwd.stub_name}({', '.join(names)}) has no input {one!r}")
    return str(one)


def autodiff(
    stub: Callable[..., Any], dims: dict[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """A differentiable version of a marked stub: drafts the backward, loads it from a file of its own,
    returns the entry."""
    path = _file_of(stub)
    draft = _of_stub(path, dims, **options)
    source = path.read_text()
    for spelling in ("from kernel_agent import autodiff\n", "from kernel_agent.autodiff import autodiff\n"):
        source = source.replace(spelling, AUTODIFF)
    file = function.folder_of_the_process() / f"{path.stem}_autograd.py"
    file.write_text(f"{source.rstrip()}\n\n\n{MARKER}\n\n{draft.text}")
    loader, module = function.module_of(file)
    sys.modules[file.stem] = module
    loader.exec_module(module)
    return functools.wraps(stub)(getattr(module, draft.entry))


__all__ = ["autodiff", "forget", "grad", "rule"]

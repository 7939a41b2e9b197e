"""What people call: the backward of a stub as text, a differentiable stub, and rules of their own."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import forward
from . import ops
from .compile import MARKER, Draft, differentiate

AUTODIFF = """
def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub
"""

Rule = Callable[[Any, Any, Any], Sequence[Any]]


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register the adjoint of an operation by the name it is called with, also in place of a built-in one.

    The function gets the graph `g`, the node of the call (its arguments are `node.args`) and the adjoint `d` of the result, and
    returns one adjoint (or None) per argument, made with `g`:

        @rule("my_silu")
        def _(g, node, d):
            (x,) = node.args
            s = g.call("sigmoid", x)
            return (g.mul(d, g.mul(s, g.add(g.number(1.0), g.mul(x, g.sub(g.number(1.0), s))))),)

    The operation is taken to be elementwise. It is called in the backward as it was called in the forward.
    """

    def register(function: Rule) -> Rule:
        ops.USER_RULES[name] = function
        return function

    return register


def forget(name: str) -> None:
    """Undo `rule`. KeyError where there is none."""
    del ops.USER_RULES[name]


def grad(stub: Callable[..., Any] | str | Path, dims: dict[str, Any] | None = None, **options: Any) -> Draft:
    """The backward section for a marked stub (or the path of its file), traced on `dims` or the first entry of SWEEP.

    `draft.text` belongs under the marker in the forward file. Raises Refusal or errors.Unusable.
    """
    path = (
        Path(stub)
        if isinstance(stub, (str, Path))
        else Path(inspect.getsourcefile(inspect.unwrap(stub)) or "")
    )
    fwd = forward.load(path, **{k: options.pop(k) for k in ("mode", "target", "device") if k in options})
    sweep = fwd.sweep_cpu or fwd.sweep
    return differentiate(fwd, dims or sweep[0].dims, options.pop("seed", 0), **options)


def autodiff(
    stub: Callable[..., Any], dims: dict[str, Any] | None = None, **options: Any
) -> Callable[..., Any]:
    """A differentiable version of a marked stub: drafts the backward, loads it from a file of its own, returns the entry."""
    path = Path(inspect.getsourcefile(inspect.unwrap(stub)) or "")
    draft = grad(path, dims, **options)
    source = path.read_text()
    for spelling in ("from kernel_agent import autodiff\n", "from kernel_agent.autodiff import autodiff\n"):
        source = source.replace(spelling, AUTODIFF)
    folder = Path(tempfile.mkdtemp(prefix="kernel-agent-"))
    file = folder / f"{path.stem}_autograd.py"
    file.write_text(f"{source.rstrip()}\n\n\n{MARKER}\n\n{draft.text}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return functools.wraps(stub)(getattr(module, draft.entry))


__all__ = ["autodiff", "forget", "grad", "rule"]

"""Host code that switches gradients off: `torch.no_grad()` and the like.

To the oracle, and to finite differences, that is how a forward is run and no part of what it computes:
`detach()` says what has no gradient. So the copies of host functions leave it out, in `with`, as their
decorators and called alone, and while a stub is traced it does nothing there. Elsewhere (a helper of another
module, a decorator of the user's) it stays as it is, and what cuts a gradient there is refused.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...forward import Forward
from ...source import tree_nodes
from ..ir.refusal import Refusal
from .host_functions import HostFunctions

SWITCHES = (torch.no_grad, torch.inference_mode, torch.set_grad_enabled)
_APART = ("detach", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def switches(fwd: Forward, function: ast.FunctionDef) -> list[tuple[ast.Call, str]]:
    """Where a host function's body switches gradients on or off, and what stands there in a copy."""
    names = vars(fwd.module)
    alone = {id(n.value) for n in tree_nodes(function) if isinstance(n, ast.Expr)}
    inner = [n for n in tree_nodes(function) if isinstance(n, ast.FunctionDef)]
    decorators = {id(d) for one in inner for d in one.decorator_list}
    return [
        (node, "pass" if id(node) in alone else "contextlib.nullcontext()")
        for node in tree_nodes(function)
        if isinstance(node, ast.Call) and id(node) not in decorators and _is_switch(_value(node.func, names))
    ]


def quiet(fwd: Forward) -> dict[str, ast.FunctionDef]:
    """The host functions that the stub calls, by their names, and that switch gradients off, or that a
    decorator of torch runs so. Not those that anything else calls too, the text of a launch included: the
    copy is called in place of them everywhere, or nowhere."""
    every = HostFunctions(fwd.tree)
    functions, reached = every.by_name, every.reached(fwd.stub_name)
    names = vars(fwd.module)
    launches = [
        n for n in tree_nodes(fwd.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)
    ]
    within = {id(node) for launch in launches for node in tree_nodes(launch)}
    callees = {
        id(n.func)
        for n in tree_nodes(fwd.tree)
        if isinstance(n, ast.Call) and every.called(n) and id(n) not in within
    }
    handed = {
        n.id
        for n in tree_nodes(fwd.tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and id(n) not in callees
    }
    return {
        name: functions[name]
        for name in functions
        if name in reached
        and name not in handed
        and (
            switches(fwd, functions[name])
            or any(_is_switch(_value(_root(d), names)) for d in functions[name].decorator_list)
        )
    }


@contextlib.contextmanager
def left_out(fwd: Forward, refused: list[Refusal]) -> Iterator[list[_Watch]]:
    """While a stub is traced: switches that its copies leave out do nothing. Where another one takes a
    gradient away, a Refusal is raised, and added to `refused`, as what the stub raises is wrapped. Yields
    the switches that are in force at a time."""
    functions = quiet(fwd)
    lines = {
        line
        for function in functions.values()
        for node, _ in switches(fwd, function)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    decorated = {id(one) for name in functions for one in _decorated(fwd, name)}

    def does_nothing(frame: FrameType) -> bool:
        if _is_decorated(frame):
            return id(frame.f_locals.get("func")) in decorated
        return frame.f_code.co_filename == fwd.path and frame.f_lineno in lines

    before: dict[type, dict[str, Any]] = {kind: dict(vars(kind)) for kind in SWITCHES}
    in_force: list[_Watch] = []

    def refuse(frame: FrameType) -> Refusal:
        code = getattr(frame.f_locals.get("func"), "__code__", None) if _is_decorated(frame) else None
        file, line = (
            (frame.f_code.co_filename, frame.f_lineno)
            if code is None
            else (code.co_filename, code.co_firstlineno)
        )
        place = f"{Path(file).name}:{line}"
        refused.append(refusal(fwd, f"{place} switches gradients off"))
        return refused[-1]

    def enter(kind: type, switch: Any) -> None:
        frame = sys._getframe(2)
        if does_nothing(frame):
            switch.prev = switch.mode = torch.is_grad_enabled()
            switch._inference_mode_context = contextlib.nullcontext()
            return
        before[kind]["__enter__"](switch)
        if _is_users(frame) and not torch.is_grad_enabled():
            in_force.append(_Watch(switch, frame, functools.partial(refuse, frame)))
            in_force[-1].__enter__()

    def leave(kind: type, switch: Any, *error: Any) -> None:
        if in_force and in_force[-1].switch is switch:
            in_force.pop().__exit__(*error)
        before[kind]["__exit__"](switch, *error)

    def begin(switch: Any, mode: bool) -> None:
        frame = sys._getframe(1)
        if does_nothing(frame):
            mode = torch.is_grad_enabled()
        elif not mode and _is_users(frame):
            raise refuse(frame)  # for how long is not known
        before[torch.set_grad_enabled]["__init__"](switch, mode)

    try:
        for kind in SWITCHES:
            own: dict[str, Any] = {
                "__enter__": lambda switch, kind=kind: enter(kind, switch),
                "__exit__": lambda switch, *error, kind=kind: leave(kind, switch, *error),
            }
            for name, function in own.items():
                setattr(kind, name, function)
        setattr(torch.set_grad_enabled, "__init__", begin)  # noqa: B010 (a type checker would not have it)
        with torch.enable_grad():
            yield in_force
    finally:
        for switch, known in before.items():
            for name in ("__enter__", "__exit__", "__init__"):
                setattr(switch, name, known[name])


class _Watch(TorchFunctionMode):
    """Refuses what computes from a differentiable tensor while gradients are off."""

    def __init__(self, switch: object, frame: FrameType, refuse: Callable[[], Refusal]) -> None:
        super().__init__()
        self.switch, self.frame, self.refuse = switch, frame, refuse

    def is_within(self, path: str, call: ast.Call) -> bool:
        """Whether gradients were switched off by what a launch calls, a launcher of the user's: what stands
        there is done within the Function that takes the place of the launch."""
        outer: FrameType | None = self.frame
        while outer is not None:
            if outer.f_code.co_filename == path and call.lineno <= outer.f_lineno <= (call.end_lineno or 0):
                return True
            outer = outer.f_back
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        read = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        if name in _APART or name.startswith("new_") or not any(t.requires_grad for t in read):
            return made
        new = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor) and all(t is not r for r in read)]
        if any(t.is_floating_point() for t in new):
            raise self.refuse()
        return made


def refusal(fwd: Forward, what: str) -> Refusal:
    """Of a gradient that is cut where no copy is made."""
    message = f"{what}, and what is computed there has one"
    remedy = "Leave torch.no_grad() out there: detach() says what has no gradient."
    return Refusal("no_grad", message, remedy, fwd.stub_line)


def _is_users(frame: FrameType) -> bool:
    if _is_decorated(frame):
        code = getattr(frame.f_locals.get("func"), "__code__", None)
        return code is not None and not code.co_filename.startswith(_NOT_USERS)
    return not frame.f_code.co_filename.startswith(_NOT_USERS)


def _is_decorated(frame: FrameType) -> bool:
    """Whether a decorator of torch runs a function in this frame: `func`."""
    return frame.f_code.co_name == "decorate_context"


def _decorated(fwd: Forward, name: str) -> Iterator[Any]:
    """What decorators of torch run of a function of the module's."""
    one = fwd.stub if name == fwd.stub_name else vars(fwd.module).get(name)
    while one is not None:
        if getattr(getattr(one, "__code__", None), "co_name", "") == "decorate_context":
            yield vars(one)["__wrapped__"]
        one = getattr(one, "__wrapped__", None)


def _is_switch(value: Any) -> bool:
    return any(value is kind or isinstance(value, kind) for kind in SWITCHES)


def _root(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a dotted name stands for in the user's module."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return functools.reduce(lambda value, part: getattr(value, part, None), parts[::-1], names.get(node.id))

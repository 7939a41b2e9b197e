"""Operation inspect: what a forward file declares. Executes the module, runs nothing of it."""

from __future__ import annotations

import ast
import inspect
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from .. import launches
from ..draw import dtype_name
from ..forward import Forward, Shape, load
from ..source import tree_nodes, words


def run(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The result of docs/protocol.md's op inspect."""
    fwd = load(
        request["file"],
        "interpret",
        request.get("target") or "sm_90",
        "cpu",
        function=request.get("function"),
    )
    return {
        "stub": {
            "name": fwd.stub_name,
            "line": fwd.stub_line,
            "params": [_parameter(parameter, fwd.grads) for parameter in fwd.params],
        },
        "grads": list(fwd.grads),
        "functions": list(fwd.functions),
        "kernels": kernels(fwd),
        "ops": operations(fwd),
        "sweep": _shapes(fwd.sweep),
        "sweep_cpu": None if fwd.sweep_cpu is None else _shapes(fwd.sweep_cpu),
        "has": {
            "setup": fwd.setup is not None,
            "flops": fwd.flops is not None,
            "reference": fwd.reference is not None,
        },
        "dtype": dtype_name(fwd.dtype),
        "device_answers": fwd.device_answers,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
    }


def _shapes(sweep: list[Shape]) -> list[dict[str, Any]]:
    return [{"dims": shape.dims, "required": shape.required} for shape in sweep]


def _parameter(parameter: inspect.Parameter, grads: tuple[str, ...]) -> dict[str, Any]:
    keyword = parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return {
        "name": parameter.name,
        "kind": "keyword" if keyword else "positional",
        "default": None if parameter.default is parameter.empty else repr(parameter.default),
        "annotation": None if parameter.annotation is parameter.empty else _annotation(parameter.annotation),
        "grad": parameter.name in grads,
    }


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def kernels(fwd: Forward) -> list[dict[str, Any]]:
    """The file's kernels in the order of their lines. A helper is called by kernels and never launched."""
    launched = _launched(fwd.tree)
    found = []
    for name, launcher in fwd.kernels.items():
        kernel = launches.jit_function(launcher)
        assert kernel is not None
        kinds = _launchers(launcher)
        found.append(
            {
                "name": name,
                "line": _line(kernel),
                "params": list(kernel.arg_names),
                "constexpr": [p.name for p in kernel.params if p.is_constexpr],
                "autotuned": Autotuner in kinds,
                "heuristics": Heuristics in kinds,
                "helper": name not in launched and name in _called(fwd),
            }
        )
    return sorted(found, key=lambda entry: entry["line"])


def _launchers(launcher: Any) -> set[type]:
    kinds = set()
    while launches.is_launcher(launcher):
        kinds.add(type(launcher))
        launcher = launcher.fn
    return kinds


def _line(kernel: JITFunction) -> int:
    """The line of the kernel's `def`, after its decorators."""
    for offset, text in enumerate(kernel.raw_src):
        if text.lstrip().startswith("def "):
            return kernel.starting_line_number + offset
    return kernel.starting_line_number


def _launched(tree: ast.Module) -> set[str]:
    """Names that are subscripted somewhere, as in kernel[grid](...), or warmed up."""
    names = set()
    for node in tree_nodes(tree):
        method = isinstance(node, ast.Attribute) and node.attr in ("run", "warmup")
        owner = node.value if isinstance(node, ast.Subscript) or method else None  # type: ignore[attr-defined]
        if isinstance(owner, ast.Name):
            names.add(owner.id)
    return names


def _called(fwd: Forward) -> set[str]:
    """Names that some kernel of the file mentions."""
    names: set[str] = set()
    for launcher in fwd.kernels.values():
        kernel = launches.jit_function(launcher)
        assert kernel is not None
        names.update(node.id for node in tree_nodes(kernel.parse()) if isinstance(node, ast.Name))
    return names


def operations(fwd: Forward) -> list[str]:
    """Names of operations in the file's kernels: functions of triton.language and methods of its tensors."""
    methods = {name for name in dir(tl.tensor) if not name.startswith("_")} - words(
        "dtype shape type handle T"
    )
    names = set()
    for launcher in fwd.kernels.values():
        kernel = launches.jit_function(launcher)
        assert kernel is not None
        for node in tree_nodes(kernel.parse()):
            if isinstance(node, ast.Call):
                name = _operation(node.func, kernel.get_capture_scope(), methods)
                if name is not None:
                    names.add(name)
    return sorted(names)


def _operation(callee: ast.expr, scope: dict[str, Any], methods: set[str]) -> str | None:
    """The operation's name when `callee` is one of triton.language, else None."""
    if isinstance(callee, ast.Name):
        value = scope.get(callee.id)
        return getattr(value, "__name__", None) if _in_language(value) else None
    if not isinstance(callee, ast.Attribute):
        return None
    value = _evaluate(callee, scope)
    if value is None:
        return callee.attr if callee.attr in methods else None
    return callee.attr if _in_language(value) else None


def _evaluate(node: ast.expr, scope: dict[str, Any]) -> Any:
    """The object behind a dotted name, None where it is not a module-level thing (a tensor's method)."""
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _evaluate(node.value, scope)
        return None if owner is None else getattr(owner, node.attr, None)
    return None


def _in_language(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("triton.language")

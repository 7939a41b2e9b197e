"""Modules that people wrote themselves: a torch.autograd.Function and what calls it, without the parts of a
pair.

    class LayerNorm(torch.autograd.Function): ...      forward(ctx, x, w, eps), backward(ctx, dy)
    layer_norm = LayerNorm.apply                       or a function that calls LayerNorm.apply(x, w, eps)

There what is called is stub and entry in one: without gradients it is the forward that the oracle evaluates,
with them it is what is checked. Only the syntax tree is read here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .errors import Unusable
from .source import MARKER

_MANY = (
    "decorate the one to be checked: @autodiff(inputs_require_grad=(0, 1)), positions of inputs in its "
    "signature"
)


@dataclass(frozen=True)
class HandWritten:
    """`name` is what is called: a function of the module, an alias of `<function>.apply`, or the class."""

    name: str
    line: int
    function: ast.ClassDef
    call: ast.FunctionDef | None  # the function that calls apply; None: apply is called directly
    grads: tuple[str, ...]  # parameters whose gradient the backward returns


def has_marker(source: str) -> bool:
    return any(line.strip() == MARKER for line in source.splitlines())


def functions_of(tree: ast.Module) -> list[ast.ClassDef]:
    """Classes that are derived from torch.autograd.Function and have both directions."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(_last(base) == "Function" for base in node.bases):
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            if {"forward", "backward"} <= methods:
                found.append(node)
    return found


def applies(tree: ast.AST, functions: list[ast.ClassDef]) -> list[tuple[ast.ClassDef, ast.Attribute]]:
    """Every `Name.apply` of one of the classes."""
    named = {function.name: function for function in functions}
    return [
        (named[node.value.id], node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "apply"
        and isinstance(node.value, ast.Name)
        and node.value.id in named
    ]


def find(tree: ast.Module, file: str) -> HandWritten | None:
    """What is to be checked, None where the module has no autograd function. Raises Unusable("two_stubs")."""
    functions = functions_of(tree)
    if not functions:
        return None
    found = [made for node in tree.body if (made := _caller(node, functions)) is not None]
    if not found and len(functions) == 1:
        (function,) = functions
        found = [HandWritten(function.name, function.lineno, function, None, _own_grads(function))]
    if len(found) != 1:
        names = ", ".join(f"{one.name} (line {one.line})" for one in found) or ", ".join(
            f"{function.name}.apply (line {function.lineno})" for function in functions
        )
        raise Unusable("two_stubs", f"several functions could be meant: {names}", file, remedy=_MANY)
    return found[0]


def find_any(tree: ast.Module) -> HandWritten | None:
    """Like find(), and the first of several: whichever is meant, people wrote the module themselves."""
    try:
        return find(tree, "")
    except Unusable:
        function = functions_of(tree)[0]
        return HandWritten(function.name, function.lineno, function, None, ())


def parameters_of(function: ast.ClassDef) -> list[str]:
    """Names of what `apply` takes: the forward's parameters without ctx."""
    methods = {item.name: item for item in function.body if isinstance(item, ast.FunctionDef)}
    names = [argument.arg for argument in methods["forward"].args.args]
    return names if "setup_context" in methods else names[1:]


def _last(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _caller(node: ast.stmt, functions: list[ast.ClassDef]) -> HandWritten | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        for function, attribute in applies(node, functions):
            if node.value is attribute:
                return HandWritten(node.targets[0].id, node.lineno, function, None, _own_grads(function))
    if isinstance(node, ast.FunctionDef):
        for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
            for function, attribute in applies(call.func, functions):
                if call.func is attribute:
                    grads = _passed_on(node, call, _own_grads(function), parameters_of(function))
                    return HandWritten(node.name, node.lineno, function, node, grads)
    return None


def _own_grads(function: ast.ClassDef) -> tuple[str, ...]:
    """Parameters of the forward whose gradient no `return` of the backward leaves out as a literal None."""
    names = parameters_of(function)
    (backward,) = [m for m in function.body if isinstance(m, ast.FunctionDef) and m.name == "backward"]
    returned = [n.value for n in ast.walk(backward) if isinstance(n, ast.Return) and n.value is not None]
    tuples = [list(value.elts) if isinstance(value, ast.Tuple) else [value] for value in returned]
    fitting = [items for items in tuples if len(items) == len(names)]
    if not fitting:
        return tuple(names)
    none = [
        all(isinstance(item := items[at], ast.Constant) and item.value is None for items in fitting)
        for at in range(len(names))
    ]
    return tuple(name for name, absent in zip(names, none, strict=True) if not absent)


def _passed_on(
    caller: ast.FunctionDef, call: ast.Call, grads: tuple[str, ...], names: list[str]
) -> tuple[str, ...]:
    """The caller's parameters that stand, maybe through a method, where the Function wants a gradient."""
    mine = [argument.arg for argument in (*caller.args.args, *caller.args.kwonlyargs)]
    wanted = []
    for name, value in zip(names, call.args, strict=False):
        used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if name in grads:
            wanted += [own for own in mine if own in used and own not in wanted]
    return tuple(own for own in mine if own in wanted)

"""Modules that people wrote themselves: a torch.autograd.Function and what calls it, not a pair's parts.

    class LayerNorm(torch.autograd.Function): ...      forward(ctx, x, w, eps), backward(ctx, dy)
    layer_norm = LayerNorm.apply                       or a function that calls LayerNorm.apply(x, w, eps)

There what is called is stub and entry in one: without gradients it is the forward that the oracle evaluates,
with them it is what is checked. A module may have several; each is a check of its own, with `make_args_NAME`,
`SWEEP_NAME` and their like where it has those. Only the syntax tree is read here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .errors import Unusable
from .source import MARKER, tree_nodes

# A function of a module that tries what it defines, and is no way to call it.
_TRIES = ("test", "bench", "demo", "example")


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
        for node in tree_nodes(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "apply"
        and isinstance(node.value, ast.Name)
        and node.value.id in named
    ]


def all_of(tree: ast.Module) -> list[HandWritten]:
    """What a module has to be checked, in order of lines: functions that return what an `apply` gives, one
    alias of each `apply`, and autograd functions that neither calls."""
    functions = functions_of(tree)
    found: list[HandWritten] = []
    for node in tree.body:
        made = _caller(node, functions)
        known = [(one.function, one.call is None) for one in found]
        if made is not None and not (made.call is None and (made.function, True) in known):
            found.append(made)
    called = {one.function for one in found}
    found += [
        HandWritten(function.name, function.lineno, function, None, _own_grads(function))
        for function in functions
        if function not in called
    ]
    return sorted(found, key=lambda one: one.line)


def named(found: list[HandWritten], name: str, file: str) -> HandWritten:
    """The one of that name, or of that autograd function. Raises Unusable("no_stub")."""
    for one in (*(o for o in found if o.name == name), *(o for o in found if o.function.name == name)):
        return one
    raise no_such(name, [one.name for one in found], file)


def no_such(name: str, names: list[str], file: str) -> Unusable:
    """Nothing of the file is called so."""
    listed = ", ".join(names) or "none"
    return Unusable(
        "no_stub",
        f"the file has nothing called {name} that could be checked: it has {listed}",
        file,
        remedy="name one of those with --function, or none: then all are checked",
    )


def called_as(one: HandWritten) -> list[str]:
    """What may stand behind `make_args_`: its name, or that of its autograd function."""
    return list(dict.fromkeys((one.name, one.function.name)))


def parameters_of(function: ast.ClassDef) -> list[str]:
    """Names of what `apply` takes: the forward's parameters without ctx."""
    methods = {item.name for item in function.body if isinstance(item, ast.FunctionDef)}
    arguments = forward_of(function).args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return names if "setup_context" in methods else names[1:]


def forward_of(function: ast.ClassDef) -> ast.FunctionDef:
    return [m for m in function.body if isinstance(m, ast.FunctionDef) and m.name == "forward"][-1]


def _last(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def _caller(node: ast.stmt, functions: list[ast.ClassDef]) -> HandWritten | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        for function, attribute in applies(node, functions):
            if node.value is attribute:
                return HandWritten(node.targets[0].id, node.lineno, function, None, _own_grads(function))
    if isinstance(node, ast.FunctionDef) and not _only_tries(node):
        for call in (inner for inner in tree_nodes(node) if isinstance(inner, ast.Call)):
            for function, attribute in applies(call.func, functions):
                if call.func is attribute:
                    grads = _passed_on(node, call, _own_grads(function), parameters_of(function))
                    return HandWritten(node.name, node.lineno, function, node, grads)
    return None


def _only_tries(function: ast.FunctionDef) -> bool:
    """A test, a benchmark: it returns nothing, or its name says so."""
    returns = [n for n in tree_nodes(function) if isinstance(n, ast.Return) and n.value is not None]
    return not returns or function.name == "main" or function.name.lstrip("_").startswith(_TRIES)


def _own_grads(function: ast.ClassDef) -> tuple[str, ...]:
    """Parameters of the forward whose gradient no `return` of the backward leaves out as a literal None."""
    names = parameters_of(function)
    backward = [m for m in function.body if isinstance(m, ast.FunctionDef) and m.name == "backward"][-1]
    returned = [n.value for n in tree_nodes(backward) if isinstance(n, ast.Return) and n.value is not None]
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
        used = {node.id for node in tree_nodes(value) if isinstance(node, ast.Name)}
        if name in grads:
            wanted += [own for own in mine if own in used and own not in wanted]
    return tuple(own for own in mine if own in wanted)

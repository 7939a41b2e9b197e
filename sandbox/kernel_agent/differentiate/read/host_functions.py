"""Functions of a file that may make launches: those at its top level, and the forwards of its autograd
Functions, which whoever calls `NAME.apply` runs."""

from __future__ import annotations

import ast


class Method(ast.FunctionDef):
    """A Function's forward under a name of its own, `NAME_forward`; in the text it is `forward`."""


def host_functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """By name."""
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef) and any(_is_function(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    fields = {name: getattr(method, name) for name in method._fields}
                    made = Method(**{**fields, "name": method_name(node.name)})
                    found[made.name] = ast.copy_location(made, method)
    return found


def _is_function(base: ast.expr) -> bool:
    return ast.unparse(base).rpartition(".")[2] == "Function"


def method_name(owner: str) -> str:
    return f"{owner.lstrip('_')}_forward"


def aliases(tree: ast.Module) -> dict[str, str]:
    """Names at the top level for an `apply`: `norm = Norm.apply`, and the class."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Attribute(ast.Name(owner), "apply")):
                found[name] = owner
    return found


def called(node: ast.AST, known: dict[str, str]) -> str | None:
    """The host function that a call is of, by its name; None for what is no such call. `known`: aliases()."""
    match node:
        case ast.Call(ast.Name(name)):
            return method_name(known[name]) if name in known else name
        case ast.Call(ast.Attribute(ast.Name(owner), "apply")):
            return method_name(owner)
    return None

"""Functions of a file that may make launches: those at its top level, and the forwards of its autograd
Functions, which whoever calls `NAME.apply` runs."""

from __future__ import annotations

import ast

from ...source import tree_nodes


class Method(ast.FunctionDef):
    """A Function's forward under a name of its own, `NAME_forward`; in the text it is `forward`."""


class HostFunctions:
    """`by_name`: all of them. Names are those of the top level; a method's is none of these."""

    def __init__(self, tree: ast.Module) -> None:
        self.by_name = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._methods: dict[str, str] = {}  # by the class
        self._aliases: dict[str, str] = {}  # `norm = Norm.apply` at the top level: the class
        for node in tree.body:
            match node:
                case ast.ClassDef(bases=bases) if any(map(_is_function, bases)):
                    self._add(node)
                case ast.Assign([ast.Name(name)], ast.Attribute(ast.Name(owner), "apply")):
                    self._aliases[name] = owner

    def _add(self, owner: ast.ClassDef) -> None:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == "forward":
                name = f"{owner.name.lstrip('_')}_forward"
                while name in self.by_name:
                    name += "_"
                fields = {field: getattr(node, field) for field in node._fields}
                self.by_name[name] = ast.copy_location(Method(**{**fields, "name": name}), node)
                self._methods[owner.name] = name

    def named(self, name: str) -> str:
        """The function that a name at the top level stands for: a class, or its apply, for its forward."""
        return self._methods.get(self._aliases.get(name, name), name)

    def calls(self) -> dict[str, set[str]]:
        """Of each function the names that its calls are of; those of no function among them."""
        return {
            name: {self.called(node) for node in tree_nodes(function)}
            for name, function in self.by_name.items()
        }

    def reached(self, name: str) -> set[str]:
        """A function, and those that it calls, and those that they call."""
        calls, reached = self.calls(), {name}
        while more := {one for known in reached for one in calls.get(known, ()) if one in calls} - reached:
            reached |= more
        return reached

    def called(self, node: ast.AST) -> str:
        """The name of the function that a call is of; "" for what is no such call."""
        match node:
            case ast.Call(ast.Name(name)) if name not in self._methods:
                return self.named(name)
            case ast.Call(ast.Attribute(ast.Name(owner), "apply")):
                return self._methods.get(owner, "")
        return ""


def _is_function(base: ast.expr) -> bool:
    return ast.unparse(base).rpartition(".")[2] == "Function"

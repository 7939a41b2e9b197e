"""Mutations of what happens between calls and at their edges: state, layouts, defaults and numbers."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from mutate_text import Mutant, Text, called, functions

_GRADIENTS = ("empty_like", "zeros_like")  # of other sizes is scratch, which every call fills anew
_KEPT = "_KEPT"  # a dictionary of the module's


def of_calls(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    """Any function of the host's, what leads to the backward too."""
    if function.name.endswith("_autograd"):
        yield from defaults(text, function)
    elif function.name != "forward":
        yield from state(text, function)
        yield from numbers(text, function)
    for node in ast.walk(function):
        if called(node) == "save_for_backward":
            yield unwatched(text, node)
        elif called(node) == "contiguous" and function.name != "backward":
            yield text.replace("input not contiguous", node, text.of(node.func.value))  # type: ignore[attr-defined]
        elif called(node) == "stride" and node.args:  # type: ignore[attr-defined]
            tensor = text.of(node.func.value)  # type: ignore[attr-defined]
            yield text.replace("row length for its stride", node, f"{tensor}.shape[-1]")


def state(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if called(node) in _GRADIENTS and node.args:  # type: ignore[attr-defined]
            size = f"{text.of(node.args[0])}.shape"  # type: ignore[attr-defined]
            key = f'("{function.name}", {node.lineno}, {node.col_offset}, str({size}))'  # type: ignore[attr-defined]
            kept = text.replace(
                "buffer kept by its size", node, f"{_KEPT}.setdefault({key}, {text.of(node)})"
            )
            yield _with_dictionary(kept)
        elif isinstance(node, ast.Attribute) and node.attr == "saved_tensors":
            first = f'{_KEPT}.setdefault("saved", {text.of(node)})'
            yield _with_dictionary(text.replace("tensors of the first call", node, first))


def unwatched(text: Text, node: ast.AST) -> Mutant:
    """Kept where autograd does not see that they change."""
    saved = ", ".join(text.of(arg) for arg in node.args)  # type: ignore[attr-defined]
    made = text.replace("saved past save_for_backward", node, f"ctx.kept_tensors = ({saved},)")
    return dataclasses.replace(made, source=made.source.replace("ctx.saved_tensors", "ctx.kept_tensors"))


def defaults(text: Text, entry: ast.FunctionDef) -> Iterator[Mutant]:
    for value in entry.args.defaults:
        if _is_number(value):
            yield text.replace("default of its own", value, f"{text.of(value)} * 2")


def numbers(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    """`ctx.eps` replaced by the default of the entry's argument `eps`."""
    known = {
        arg.arg: text.of(value)
        for entry in functions(text.backward())
        if entry.name.endswith("_autograd")
        for arg, value in zip(
            entry.args.args[len(entry.args.args) - len(entry.args.defaults) :],
            entry.args.defaults,
            strict=True,
        )
        if _is_number(value)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in known:
            yield text.replace("number hard-coded", node, known[node.attr])


def _is_number(value: ast.AST) -> bool:
    number = value.operand if isinstance(value, ast.UnaryOp) else value
    return (
        isinstance(number, ast.Constant)
        and isinstance(number.value, int | float)
        and not isinstance(number.value, bool)
    )


def _with_dictionary(mutant: Mutant) -> Mutant:
    return dataclasses.replace(mutant, source=f"{mutant.source.rstrip()}\n\n\n{_KEPT} = {{}}\n")

"""Mutations of the host's part of a backward: launches, buffers, saved tensors and what is returned."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from mutate_text import Mutant, Text, called

_UNFILLED = {"zeros": "empty", "zeros_like": "empty_like", "new_zeros": "new_empty"}


def of_host(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    """A helper, or the Function's `backward`; what `forward` and the entry do is the user's forward."""
    for make in (launches, buffers, saved, needs):
        yield from make(text, function)
    if function.name == "backward":
        yield from upstreams(text, function)
        yield from returned(text, function)


def launches(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if called(node) == "cdiv":
            up, block = (text.of(arg) for arg in node.args[:2])  # type: ignore[attr-defined]
            yield text.replace("tail tile skipped", node, f"max(({up}) // ({block}), 1)")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
            continue
        for grid in ast.walk(node.func.slice):
            if isinstance(grid, ast.Tuple):
                for size in grid.elts:
                    yield text.replace("one program fewer", size, f"max(({text.of(size)}) - 1, 1)")
        for left, right in itertools.pairwise(node.args):
            if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                yield text.swap("launch arguments swapped", node, left, right)


def buffers(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if called(node) in _UNFILLED:
            func = node.func  # type: ignore[attr-defined]
            yield text.replace("not initialised", func, f"{text.of(func.value)}.{_UNFILLED[func.attr]}")


def saved(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and "saved_tensors" in text.of(node.value):
            target = node.targets[0]
            if isinstance(target, ast.Tuple):
                for left, right in itertools.pairwise(target.elts):
                    yield text.swap("saved tensors swapped", target, left, right)


def needs(text: Text, function: ast.FunctionDef) -> Iterator[Mutant]:
    """`ctx.needs_input_grad[i]` asked for the next input that is asked for at all."""
    found = [
        node.slice
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and text.of(node.value).endswith("needs_input_grad")
        and isinstance(node.slice, ast.Constant)
    ]
    known = sorted({node.value for node in found if isinstance(node.value, int)})
    for node in found:
        if len(known) > 1 and isinstance(node.value, int):
            other = known[(known.index(node.value) + 1) % len(known)]
            yield text.replace("wrong needs_input_grad", node, str(other))


def upstreams(text: Text, method: ast.FunctionDef) -> Iterator[Mutant]:
    body = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    indent = " " * body[0].col_offset
    names = [arg.arg for arg in method.args.args[1:]]
    for name in names:
        ones = f"{name} = torch.ones_like({name})\n{indent}{text.of(body[0])}"
        yield text.replace("upstream replaced by ones", body[0], ones)
    for node in ast.walk(method):
        if called(node) == "contiguous" and text.of(node.func.value) in names:  # type: ignore[attr-defined]
            yield text.replace("upstream not contiguous", node, text.of(node.func.value))  # type: ignore[attr-defined]


def returned(text: Text, method: ast.FunctionDef) -> Iterator[Mutant]:
    for node in ast.walk(method):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        elements = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        real = [e for e in elements if not isinstance(e, (ast.Constant, ast.Starred))]
        for left, right in itertools.pairwise(real):
            yield text.swap("two gradients swapped", node.value, left, right)
        if len(real) < len(elements) and len(elements) > 1:
            turned = [text.of(elements[-1]), *(text.of(e) for e in elements[:-1])]
            yield text.replace("gradients returned one place on", node.value, ", ".join(turned))
        for element in real:
            yield text.replace("gradient left out", element, "None")
            gradient = element.body if isinstance(element, ast.IfExp) else element
            if isinstance(gradient, ast.Name):
                turned_round = f"{gradient.id}.transpose(-1, -2).reshape({gradient.id}.shape)"
                yield text.replace("transposed", gradient, turned_round)

"""Copies of the host functions: the user's text, edited where it launches, and where autograd has to see."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from ...forward import Forward
from ...source import autodiff_names, tree_nodes
from ..read import grad_mode
from ..read.host_functions import HostFunctions, Method
from ..read.parted import Apart
from ..read.trace import Site, Untraced
from .line_breaks import WIDTH, wrap


def kept_decorators(fwd: Forward, host: ast.FunctionDef) -> list[str]:
    """Source of the user's own decorators: what they do to arguments is a part of the forward. Not those of
    torch (no_grad, compile), which are about how it is run, nor the marker."""
    kept = []
    for decorator in host.decorator_list:
        root: ast.expr = decorator
        while isinstance(root, (ast.Call, ast.Attribute)):
            root = root.func if isinstance(root, ast.Call) else root.value
        value = vars(fwd.module).get(root.id) if isinstance(root, ast.Name) else None
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") or ""
        marks = isinstance(root, ast.Name) and root.id in autodiff_names(fwd.tree)
        marks = marks or (isinstance(root, ast.Name) and root.id == "staticmethod")
        if not marks and home.partition(".")[0] not in ("torch", "kernel_agent"):
            kept.append(_segment(fwd.source, decorator))
    return kept


def host_copy(
    fwd: Forward,
    stub: ast.FunctionDef,
    sites: list[Site],
    untraced: list[Untraced],
    renamed: dict[str, str],
    owned: Sequence[str],
    apart: Sequence[Apart] = (),
) -> str:
    """A copy of a host function, NAME_autograd, its launches made through their Functions; those that are
    `untraced` raise. Parameters that are `owned` come to have memory of their own; what is `apart` is a
    tensor of its own to autograd."""
    source = _noted(fwd.source, stub) if isinstance(stub, Method) else fwd.source
    lines = source.splitlines()
    edits: list[tuple[ast.AST, str]] = [
        (u.call, f'untraced("{u.kernel_name}", {_line_of(fwd, u.call)})') for u in untraced if u.host is stub
    ]
    for site in sites:
        if site.host is not stub:
            continue
        grid = ast.get_source_segment(source, site.call.func.slice) or ""  # type: ignore[attr-defined]
        if isinstance(site.call.func.slice, ast.Tuple) and not grid.startswith("("):  # type: ignore[attr-defined]
            grid = f"({grid})"
        passed = [*site.call.args, *(k.value for k in site.call.keywords if k.arg is not None)]
        if site.first is not None:
            passed = [site.first[1], *(e for e in passed if e is not site.first[1])]
        args = [_segment(source, e) for e in passed]
        unpacked = [_segment(source, k.value) for k in site.call.keywords if k.arg is None]
        if unpacked:
            whole = unpacked[0] if len(unpacked) == 1 else f"{{{', '.join('**' + u for u in unpacked)}}}"
            names = "".join(f', "{name}"' for name in site.unpacked)
            args.append(f"*passed({whole}{names})")
        if site.tables:
            args.append(f"*behind(pointed, {', '.join(_segment(source, e) for e in site.tables.values())})")
        indent = site.call.col_offset
        one = f"{site.class_name}.apply({', '.join([grid, *args])})"
        if len(one) + indent > WIDTH:
            pad = " " * (indent + 4)
            wrapped = [pad + line + "," for line in wrap([grid, *args], WIDTH - indent - 6)]
            one = "\n".join([f"{site.class_name}.apply(", *wrapped, " " * indent + ")  # fmt: skip"])
        edits.append((site.call, one))
    every = HostFunctions(fwd.tree)
    for node in tree_nodes(stub):
        if isinstance(node, ast.Call) and (name := every.called(node)) in renamed:
            edits.append((node.func, renamed[name]))
            if isinstance(every.by_name[name], Method):
                edits.append((_before(node.args[0]), "Unsaved(), "))  # its context
    within = {id(node) for node in tree_nodes(stub)}
    edits += [(one.value, one.text(_segment(source, one.value))) for one in apart if id(one.value) in within]
    edits += [(name, "torch.cuda") for name in _of_torch_cuda(fwd, stub)]
    edits += grad_mode.switches(fwd, stub)
    taken = {line for site in sites if site.host is stub for line in site.taken}
    edits += [(call, f"address_of({_segment(source, t)}, pointed)") for call, t in _taking(stub, taken)]
    if any(site.expanded for site in sites):
        edits += [
            (call, f"own({_segment(source, call)})") for call in _expanding(stub, [e for e, _ in edits])
        ]
    start = stub.lineno - 1
    body = lines[start : stub.end_lineno]
    for node, new in sorted(edits, key=lambda e: (e[0].lineno, e[0].col_offset), reverse=True):  # type: ignore[attr-defined]
        first, last = node.lineno - 1 - start, node.end_lineno - 1 - start  # type: ignore[attr-defined]
        head = body[first].encode()[: node.col_offset].decode()  # type: ignore[attr-defined]
        tail = body[last].encode()[node.end_col_offset :].decode()  # type: ignore[attr-defined]
        if "\n" in new and "fmt: skip" in tail:
            tail = ""
        body[first : last + 1] = (head + new + tail).split("\n")
    written = "forward" if isinstance(stub, Method) else stub.name
    body[0] = body[0].replace(f"def {written}(", f"def {stub.name}_autograd(", 1)
    documented = ast.get_docstring(stub, clean=False) is not None and len(stub.body) > 1
    first = stub.body[int(documented)]
    opening = [f"{name} = own({name})" for name in owned] + ["pointed = {}"] * bool(taken)
    for line in reversed(opening):
        body.insert(first.lineno - 1 - start, " " * first.col_offset + line)
    body = [line.removeprefix(" " * stub.col_offset) for line in body]
    return "\n".join(["", *(f"@{text}" for text in kept_decorators(fwd, stub)), *body]) + "\n"


def _expanding(function: ast.FunctionDef, others: Sequence[ast.AST]) -> list[ast.Call]:
    """Calls that give a tensor whose elements share memory, so that none has a gradient of its own; not those
    in or around `others`, nor in another of them."""

    def parts(node: ast.AST) -> set[ast.expr]:
        return {part for part in tree_nodes(node) if isinstance(part, ast.expr)}

    found: list[ast.Call] = []
    beside = set[ast.expr]().union(*map(parts, others))
    for node in tree_nodes(function):  # from the outside in
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("expand", "expand_as", "broadcast_to")
            and node not in beside
            and not beside & parts(node)
        ):
            found.append(node)
            beside |= parts(node)
    return found


def _noted(source: str, method: Method) -> str:
    """The text, with what a forward notes in its context, `ctx.size`, as variables, `ctx_size`."""
    context = method.args.args[0].arg
    lines = [line.encode() for line in source.split("\n")]
    for node in tree_nodes(method):
        match node:
            case ast.Attribute(ast.Name(owner) as name, attr) if owner == context and not _is_of_contexts(
                attr
            ):
                line, at = lines[name.lineno - 1], name.end_col_offset or 0
                if line[at : at + 1] == b".":
                    lines[name.lineno - 1] = line[:at] + b"_" + line[at + 1 :]
    return b"\n".join(lines).decode()


def _is_of_contexts(name: str) -> bool:
    return name in ("needs_input_grad", "set_materialize_grads") or name.startswith(("save_for_", "mark_"))


def _before(node: ast.expr) -> ast.expr:
    """The place in front of an expression, for an edit that puts something there."""
    place = ast.Constant(None)
    place.lineno = place.end_lineno = node.lineno
    place.col_offset = place.end_col_offset = node.col_offset
    return place


def _line_of(fwd: Forward, node: ast.expr) -> str:
    """The line of a launch, as the copy names it."""
    place = fwd.adopted.place(node.lineno) if fwd.adopted is not None else None
    return str(node.lineno) if place is None else f'"{place.line(node.lineno)} of {Path(place.path).name}"'


def _of_torch_cuda(fwd: Forward, function: ast.FunctionDef) -> list[ast.Name]:
    """Other names for torch.cuda in the heads of `with`: libraries for several vendors' cards have one, which
    is not imported in the backward part."""
    heads = [
        item.context_expr
        for node in tree_nodes(function)
        if isinstance(node, ast.With)
        for item in node.items
    ]
    names = [node for head in heads for node in tree_nodes(head) if isinstance(node, ast.Name)]
    known = vars(fwd.module)
    if known.get("torch") is not torch:
        return []
    return [name for name in names if name.id != "torch" and known.get(name.id) is torch.cuda]


def _taking(function: ast.FunctionDef, lines: set[int]) -> list[tuple[ast.Call, ast.expr]]:
    """The calls of data_ptr() on some lines, and what they are made on."""
    return [
        (node, node.func.value)
        for node in tree_nodes(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "data_ptr"
        and any(node.lineno <= line <= (node.end_lineno or line) for line in lines)
    ]


def _segment(source: str, node: ast.expr) -> str:
    return " ".join((ast.get_source_segment(source, node) or "").split())

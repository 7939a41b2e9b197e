"""Gradients that are another tensor, element by element: nobody has to write them.

    y = x + f(z)        the gradient of x is that of y, which torch hands in
    s = x + r           the gradients of x and r are one

A store of what was loaded at the same place of an upstream gradient, or of what is stored at the same place
of another gradient, makes a copy. Whether the copy is the whole gradient, laid out like it and of its type,
the host asks in each call: it passes no memory for it then, and the kernel leaves the store out.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir.nodes import GradWrite, Node, beneath
from ..ir.spelling import gradient_name


def find(stores: list[GradWrite], names: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """By the name of a gradient in `names`, that of which it is a copy where it is laid out the same: the
    upstream gradient of one of `outputs`, or another of those gradients. Marks their stores. `stores`: all of
    the main kernel, of which each in `names` has one."""
    copies: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for write in stores:
        name = write.base.attrs["name"]
        if name not in names:
            continue
        source = _upstream(write, outputs) or first.get(_place(write, write.value))
        if source is None:
            first[_place(write, write.value)] = gradient_name(name)
        else:
            copies[name] = source
            write.left_out = True
    return copies


def _place(write: GradWrite, value: Node) -> tuple:
    return value, write.offset, write.mask, write.region


def _upstream(write: GradWrite, outputs: Collection[str]) -> str | None:
    """The upstream gradient that a store copies."""
    load = beneath(write.value, "cast")  # adjoints are rounded where they are stored, and nowhere else
    if load.op != "load" or not load.attrs.get("upstream") or load.args[0].op != "param":
        return None
    base, offset, *rest = load.args
    same = offset is write.offset and (rest[0] if rest else None) is write.mask
    return gradient_name(base.attrs["name"]) if same and base.attrs["name"] in outputs else None

"""Tables of addresses: `tl.load(table + g).to(tl.pointer_type(...))` is a pointer to one of several tensors.

Such a pointer is a node of its own, an `entry` of its table. The host makes a second table, of gradients of
the same tensors in the same order, so that the entry of the gradient has the same index. Every entry gets a
gradient of its own, and autograd adds up those of a tensor that stands in several: two writes meet only where
both the index and the offset are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .graph import Graph
from .nodes import HALF, Node, real
from .refusal import Refusal
from .values import Arg

if TYPE_CHECKING:
    pass

CONSTRUCT = "table of pointers"


def entry(g: Graph, table: Node, index: Node, element: str, active: bool, role: str = "forward") -> Node:
    """An entry of a table; `role`: of the forward's own, the upstream gradients', or the gradients'."""
    attrs = {"name": table.attrs["name"], "none": False, "elem": element, "role": role}
    node = g.make("entry", (table, index), attrs, "pointer", ())
    node.active = active
    return node


def entry_of(g: Graph, base: Node, role: str) -> Node:
    """Where the gradient of what `base` points to is; `base` itself where that is no entry of a table."""
    if base.op != "entry":
        return base
    element = base.attrs["elem"]
    if role == "gradient" and real(element) in HALF:
        element = "float32"  # in which gradients of these are added up
    found = entry(g, base.args[0], base.args[1], element, False, role)
    if found.hint is None and base.hint is not None:
        found.hint = f"d_{base.hint}"
    return found


def root(base: Node) -> Node:
    """The argument that an address is based on."""
    return base.args[0] if base.op == "entry" else base


def storages(args: dict[str, Arg], base: Node) -> frozenset[int]:
    """The memory that a pointer may point into; a tensor without elements has none."""
    arg = args[base.attrs["name"]]
    if base.op == "entry" and arg.behind is not None:
        return arg.behind.value
    return frozenset([arg.storage] if arg.storage else [])


# the host's side


@dataclass
class Taken:
    """The tensors whose address the stub asked for, and the line where it did."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    lines: dict[int, int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)  # storages of inputs that want gradients

    def behind(self, table: Any) -> list[torch.Tensor] | None:
        """The tensors that a table holds the addresses of; None where it is no such table."""
        if not isinstance(table, torch.Tensor) or table.dtype not in (torch.int64, torch.uint64):
            return None
        found = [self.tensors.get(at) for at in table.detach().flatten().tolist()] if self.tensors else []
        return None if not found or any(t is None for t in found) else found  # type: ignore[return-value]

    def cut_off(self, tensors: list[torch.Tensor]) -> bool:
        """Whether one of them shares memory with an input, but not its gradient."""
        return any(not t.requires_grad and t.untyped_storage().data_ptr() in self.wanted for t in tensors)


@contextmanager
def addresses_taken(file: str) -> Iterator[Taken]:
    """Inside, every data_ptr() that `file` asks for is noted."""
    taken, original = Taken(), torch.Tensor.data_ptr

    def noted(self: torch.Tensor) -> int:
        at = original(self)
        frame = sys._getframe(1)
        if frame.f_code.co_filename == file and at:
            taken.tensors[at], taken.lines[at] = self, frame.f_lineno
        return at

    torch.Tensor.data_ptr = noted  # type: ignore[method-assign, assignment]
    try:
        yield taken
    finally:
        del torch.Tensor.data_ptr


def behind_of(name: str, tensors: list[torch.Tensor] | None) -> Arg | None:
    """What a table points to, as an argument. Its tensors have one type, or it is no table for a kernel."""
    if not tensors or len({t.dtype for t in tensors}) > 1:
        return None
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    active = any(t.requires_grad and t.is_floating_point() for t in tensors)
    owned = frozenset(t.untyped_storage().data_ptr() for t in tensors)
    return Arg(name, "table", owned, dtype, active)


def check_written(name: str, tensors: list[torch.Tensor], refuse: Callable[[str, str], Refusal]) -> None:
    """What a launch writes through a table has to be whole tensors of its own: each gets its gradient."""
    if any(t._is_view() for t in tensors):
        raise refuse(
            f"`{name}` points into views, which autograd cannot give several new values at once",
            "Allocate every output by itself, and combine them with torch.",
        )
    if len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors):
        raise refuse(f"`{name}` points to one output twice", "Allocate every output by itself.")

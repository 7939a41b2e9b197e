"""Where values come from: which storages depend on the upstream gradient, and which of those kernels wrote.

Of interpreted launches it is known what they read and wrote; of torch operations, their operands. Storages
are looked at as wholes, and a launch writes everything from all that it reads: too much may seem to depend on
the upstream, and nothing too little, except behind tables of addresses. Where a launch has one, all that it
is given counts as read and written, and `blind` says that what it is not given may be too.

Where a module that people wrote themselves has one number as its output, its forward may make the gradient
and its backward scale it: `made` are storages that launches of the forward wrote, and what moves and
scalings make of them. Any other torch operation that writes to one takes it off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .summands import Summands

_BITS = frozenset({"aten::view", "aten::view_copy"})
# Of their operands they take shape and type alone.
_FRESH = ("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::new_", "aten::rand")
_MOVING = frozenset(
    {f"aten::{name}" for name in ("clone", "_to_copy", "copy_", "contiguous", "alias", "detach", "sum")}
)
_PASSING = _MOVING | {"aten::cat", "aten::stack", "aten::index", "aten::index_select"}
_SCALING = frozenset({"aten::mul", "aten::mul_", "aten::div", "aten::div_"})
# Methods of tensors that hand out values, or run code of Python for each, and that no dispatcher sees.
_UNSEEN = (
    "map_",
    "map2_",
    "apply_",
    "numpy",
    "tolist",
    "__array__",
    "storage",
    "untyped_storage",
    "__dlpack__",
)


class Flow:
    """One case. Memory that matters is kept, so that no address means two things."""

    def __init__(self) -> None:
        self.upstream: set[int] = set()  # first bytes of storages that depend on an upstream
        self.written: set[int] = set()  # those of them that a kernel wrote, or that come from such
        self.scales = False  # the forward may make gradients
        self.made: set[int] = set()
        self.blind = False
        self.rounded: set[int] = set()  # what the host made narrower of what kernels wrote
        self._summands = Summands()
        self._kept: list[torch.Tensor] = []

    def begins(self, upstreams: Iterable[torch.Tensor]) -> None:
        given = list(upstreams)
        self._add(self.upstream, given)
        self._summands.begins(given)

    def traced(self, gradient: torch.Tensor) -> bool:
        """Whether a kernel that read the upstream wrote it, as far as can be seen."""
        start = start_of(gradient)
        made = self.scales and start in self.made
        return self.blind or not gradient.numel() or start in self.written or made

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether launches of the forward wrote it."""
        return start_of(tensor) in self.made

    def forward(self, tensors: Iterable[torch.Tensor], wrote: set[int] | None) -> None:
        """A launch of the forward; None where it was not seen what it wrote."""
        self._add(self.made, [t for t in tensors if wrote is not None and start_of(t) in wrote])

    def launched(self, tensors: Iterable[torch.Tensor], read: set[int] | None, wrote: set[int]) -> None:
        """A launch that was given `tensors`; first bytes of the storages that it read and wrote, None where
        it was not seen."""
        given = list(tensors)
        if read is None:
            self.blind = True
            read = wrote = {start_of(tensor) for tensor in given}
        self.rounded -= wrote
        self._summands.wrote(wrote)
        if read & self.upstream:
            made = [tensor for tensor in given if start_of(tensor) in wrote]
            self._add(self.upstream, made)
            self._add(self.written, made)

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str | None:
        """Follows a torch operation. Its name where it gets at values of the upstream, or at bits of floating
        numbers, that only kernels are to compute with."""
        name = func._schema.name
        operands = list(tensors_of((args, kwargs)))
        made = list(tensors_of(result))
        if name in _BITS and operands and made:
            before, after = operands[0].dtype, made[0].dtype
            if before != after and before.is_floating_point != after.is_floating_point:
                return f"aten::view of {_name(before)} as {_name(after)}"
        changed = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_of(value)
        ]
        if self.scales:
            self._follow(name, operands, changed, made)
        if not self.upstream or name.startswith(_FRESH):
            return None
        starts = {start_of(tensor) for tensor in operands}
        if not starts & self.upstream:
            return None
        self._add(self.upstream, made + changed)
        several = self._summands.operation(name, args, kwargs, changed, result)
        if starts & self.written:
            self._add(self.written, made + changed)
            return several or self._rounds(name, operands, (changed or made)) or name
        return several or name

    def _rounds(self, name: str, operands: list[torch.Tensor], made: list[torch.Tensor]) -> str | None:
        """Follows what the host made narrower. A name where it makes such wider again."""
        if name not in _PASSING:
            return None
        of = [t for t in (operands[1:] if name == "aten::copy_" else operands) if t.is_floating_point()]
        for to in made:
            if not to.is_floating_point():
                continue
            precision = torch.finfo(to.dtype).eps
            wider = [t for t in of if start_of(t) in self.rounded and torch.finfo(t.dtype).eps > precision]
            if wider:
                return f"{name} of what the host rounded to {_name(wider[0].dtype)}"
            if to.numel() and any(
                start_of(t) in self.rounded or torch.finfo(t.dtype).eps < precision for t in of
            ):
                self.rounded.add(start_of(to))
        return None

    def _follow(
        self, name: str, operands: list[torch.Tensor], changed: list[torch.Tensor], made: list[torch.Tensor]
    ) -> None:
        """What an operation leaves of `made`."""
        of = operands[1:] if name == "aten::copy_" else operands
        most = max((tensor.numel() for tensor in of), default=0)
        large = [tensor for tensor in of if tensor.numel() == most]
        alone = name in _MOVING or (name in _SCALING and (len(large) == 1 or most == 1))
        if alone and any(start_of(tensor) in self.made for tensor in large):
            self._add(self.made, made + changed)
        elif changed:
            self.made -= {start_of(tensor) for tensor in changed}

    def matters(self, tensor: torch.Tensor) -> bool:
        """Whether its values are only for kernels to compute with."""
        return tensor.is_floating_point() or tensor.is_complex() or start_of(tensor) in self.upstream

    def _add(self, to: set[int], tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            start = start_of(tensor)
            if start and start not in to:  # without elements all lie at 0
                to.add(start)
                self._kept.append(tensor)


def start_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_of(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


@contextlib.contextmanager
def unseen(note: Callable[[str, torch.Tensor], None], not_from: tuple[str, ...]) -> Iterator[None]:
    """Inside, `note(name, tensor)` is called for each use of a method that no dispatcher sees, but by code
    whose file begins with one of `not_from`."""

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(not_from):
                note(f"Tensor.{name}", tensor)
            return method(tensor, *args, **kwargs)

        return call

    own = {name: vars(torch.Tensor).get(name) for name in _UNSEEN}
    try:
        for name in _UNSEEN:
            setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)

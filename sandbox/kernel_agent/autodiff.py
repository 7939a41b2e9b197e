"""The one name that a forward file imports: `@autodiff(inputs_require_grad=(0, 1))` marks the stub.

The decorated function is returned unchanged, so a marked file trains, imports and tests as before;
kernel-agent reads the mark. `from kernel_agent import autodiff` and `from kernel_agent.autodiff import
autodiff` give the same function: the package binds the name `autodiff` to it after this module has been
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Stub = TypeVar("Stub", bound=Callable[..., Any])

USAGE = "write @autodiff(inputs_require_grad=(0, 1)) with the positions of the inputs that want gradients"


class MisusedMark(TypeError):
    """@autodiff was used in a way that names no inputs."""


def autodiff(
    inputs_require_grad: Sequence[int] | int | None = None, *, idxs_buffers: Sequence[int] | int | None = None
) -> Callable[[Stub], Stub]:
    """Mark a host function ("stub") whose backward kernel-agent shall make.

    `inputs_require_grad` are positions in the stub's signature; `idxs_buffers` is the older spelling of the
    same. Raises MisusedMark (a TypeError) when used bare, or with anything but positions.
    """
    if callable(inputs_require_grad):
        raise MisusedMark(f"@autodiff was used without parentheses: {USAGE}")
    if (inputs_require_grad is None) == (idxs_buffers is None):
        raise MisusedMark(f"@autodiff takes one tuple of positions: {USAGE}")
    given = inputs_require_grad if inputs_require_grad is not None else idxs_buffers
    positions = (given,) if isinstance(given, int) else tuple(given or ())
    if not positions or not all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions):
        raise MisusedMark(f"@autodiff got {given!r}: {USAGE}")

    def mark(stub: Stub) -> Stub:
        stub.__kernel_agent__ = {"inputs_require_grad": positions}  # type: ignore[attr-defined]
        return stub

    return mark

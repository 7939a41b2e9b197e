"""The base of this package's dispatch modes."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """A mode that nothing is compiled under. torch would guard against that, and import its compiler for it:
    more than a second of processor time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Idle(Mode):
    """Changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

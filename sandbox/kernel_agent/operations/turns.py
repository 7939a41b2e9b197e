"""The GPU alone, for as long as something is timed: asked for by a word, given back by another.

    with turns.alone():
        ...     # nobody else's kernels begin

docs/protocol.md, Turns, has the words. Where the request has no `turns`, this process has the GPU alone
anyway, or there is none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from ..errors import Unusable

_ASKS, _IS_THROUGH, _BEGINS = b"?", b".", b"!"
_STANDARD_INPUT = 0


class Turns:
    """Not for several threads."""

    def __init__(self, channel: int | None) -> None:
        """`channel`: a descriptor to the daemon; None: nobody is to be asked."""
        self.channel = channel

    @classmethod
    def of(cls, request: dict[str, Any]) -> Turns:
        """Before the user's code is loaded: its standard input is empty, and what it starts cannot ask."""
        if not request.get("turns"):
            return cls(None)
        channel = os.dup(_STANDARD_INPUT)  # which is not inherited
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, _STANDARD_INPUT)
        os.close(null)
        return cls(channel)

    @property
    def shared(self) -> bool:
        """Whether others may be at work on the GPU between turns."""
        return self.channel is not None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits as long as it takes. The turn ends with the block, however that ends."""
        if self.channel is None:
            yield
            return
        try:
            os.write(self.channel, _ASKS)
            answer = os.read(self.channel, 1)
        except OSError:
            answer = b""
        if answer != _BEGINS:
            raise Unusable("internal", "the daemon gives no turn alone on the GPU any more")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # nobody is there to be told
                os.write(self.channel, _IS_THROUGH)

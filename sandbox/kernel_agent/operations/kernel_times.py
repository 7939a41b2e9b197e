"""How long each kernel of a call takes: of what is timed as a whole, where the time goes.

    found = kernel_times(gpu, call, seed)
    [{"pass": "bwd", "name": "softmax_bwd", "launches": 1, "ms": 0.0512}, ...]

Events stand around every launch of a plain call. The device is kept busy before, so that it never waits for
the host between two of them. What torch launches by itself (zeros, sums, casts) is in no row.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..forward import Launch, launch_intercept
from ..launches import benchmarking
from .device_clock import Gpu

_CALLS = 3  # each kernel has its fastest
MOST = 24  # rows


class Call(Protocol):
    """What the benchmark calls: a forward, then its backward."""

    outputs: list[torch.Tensor]
    upstreams: list[torch.Tensor]

    def forward(self) -> None: ...
    def backward(self) -> object: ...
    def draw_upstreams(self, seed: int) -> list[torch.Tensor]: ...


class _Watch:
    """Of one pass: the events around each launch."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.spans: list[tuple[str, Any, Any]] = []

    def __call__(self, launch: Launch) -> Any:
        if benchmarking():
            return launch.run()
        start = self.gpu.mark()
        made = launch.run()
        self.spans.append((launch.name, start, self.gpu.mark()))
        return made

    def sums(self) -> dict[str, tuple[int, float]]:
        """By kernel, in the order of their first launches: how many, and milliseconds of all together."""
        found: dict[str, tuple[int, float]] = {}
        for name, start, end in self.spans:
            count, ms = found.get(name, (0, 0.0))
            found[name] = (count + 1, ms + self.gpu.between(start, end))
        return found


def kernel_times(gpu: Gpu, call: Call, seed: int) -> list[dict[str, Any]]:
    """Rows of both passes. The caller has the GPU alone, and everything is compiled and tuned."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(_CALLS):
        for which in ("fwd", "bwd"):
            watch = _Watch(gpu)
            gpu.queue()
            with launch_intercept(watch):
                call.forward() if which == "fwd" else call.backward()
            for name, (count, ms) in watch.sums().items():
                row = rows.setdefault(
                    (which, name), {"pass": which, "name": name, "launches": count, "ms": ms}
                )
                row["ms"] = min(row["ms"], ms)
            if which == "fwd":
                call.upstreams = call.draw_upstreams(seed)
        call.outputs = []
    return list(rows.values())[:MOST]

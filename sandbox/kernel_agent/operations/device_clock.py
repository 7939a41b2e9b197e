"""What the benchmark wants of a GPU, in one place: a clock, a cold cache, graphs, memory, a compiler.

    gpu = Gpu("cuda")
    made, ms, late = gpu.time(call)     one call, its inputs no longer in the L2
    replay = gpu.capture(call, pool)    the same call as a CUDA graph

Tests put an object with the same methods in its place: nothing else of the benchmark asks torch.cuda.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import Unusable

Made = TypeVar("Made")

_L2_UNKNOWN = 128 << 20  # larger than any that there is today
WARM_CALLS, WARM_SECONDS = 3, 1.0
_AHEAD_CYCLES = 30_000_000  # some 20 ms: the host launches a pass of a few kernels in less
_CROWD = 0.1  # of the memory; a context and the kernels of one process have less
# Work of others lets a tiny kernel wait for their slices of time, a millisecond or more.
_QUIET_SECONDS, _QUIET_MOST, _SLOW_SECONDS = 0.03, 3.0, 5e-4


class Gpu:
    """One CUDA device. Not for several threads."""

    mode = "cuda"  # how kernels of a file are launched: forward.load()

    def __init__(self, device: str, scratch: Path) -> None:
        """`scratch`: where torch.compile may leave files."""
        self.device = torch.device(device)
        self.scratch = scratch
        if not torch.cuda.is_available():
            raise Unusable(
                "needs_gpu", "torch finds no GPU here", remedy="kernel-agent doctor says what it has"
            )
        card = torch.cuda.get_device_properties(self.device)
        self.l2 = int(getattr(card, "L2_cache_size", 0)) or _L2_UNKNOWN
        self.copy_bytes = max(256 << 20, 8 * self.l2)  # of a tensor that is copied to find the bandwidth
        self._lines = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)

    def matmul_order(self, dtype: torch.dtype) -> int:
        """Of square matrices that keep the device busy for milliseconds."""
        return 4096 if dtype in (torch.float32, torch.float64) else 8192

    def describe(self) -> dict[str, Any]:
        card = torch.cuda.get_device_properties(self.device)
        return {
            "name": card.name,
            "capability": f"sm_{card.major}{card.minor}",
            "l2_bytes": self.l2,
            "memory_bytes": card.total_memory,
        }

    def time(self, call: Callable[[], Made]) -> tuple[Made, float, float]:
        """What the call made, its milliseconds by the device's clock, and those for which the device went on
        after the call's stream had ended: what a call leaves to other streams is not in the first figure.

        Twice the L2 is written before: neither inputs nor what the call before has left are in it.
        """
        self._lines.fill_(0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        made = call()
        end.record()
        end.synchronize()
        ended = time.perf_counter()
        torch.cuda.synchronize()
        late = 1e3 * (time.perf_counter() - ended)
        return made, start.elapsed_time(end), late

    def queue(self) -> None:
        """Keep the device busy for a while: what the host launches meanwhile waits in a row behind it."""
        torch.cuda._sleep(_AHEAD_CYCLES)

    def mark(self) -> torch.cuda.Event:
        """A point in the stream, which Gpu.between() measures from and to."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds. Waits for the end."""
        end.synchronize()
        return start.elapsed_time(end)

    def settle(self) -> None:
        """Wait, for seconds at most, until nobody's kernels run: processes that were stopped to make way have
        launched some that are still to come."""
        began = calm = time.perf_counter()
        while (now := time.perf_counter()) < calm + _QUIET_SECONDS and now < began + _QUIET_MOST:
            self._lines[:1].fill_(0)
            torch.cuda.synchronize()
            if time.perf_counter() - now > _SLOW_SECONDS:
                calm = time.perf_counter()

    def warm(self, call: Callable[[], object]) -> None:
        """Compile, tune, and allocate, beside the stream in use, as a capture wants it. What takes long is
        not called again."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            began = time.monotonic()
            for _ in range(WARM_CALLS):
                call()
                if time.monotonic() - began > WARM_SECONDS:
                    break
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def pool(self) -> Any:
        """Memory that graphs share which are always replayed in the order in which they were captured."""
        return torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], object], pool: Any) -> Callable[[], None]:
        """Raises whatever keeps the call from being captured: a copy to the host, an allocation by others."""
        before = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                call()
        except Exception as exc:  # noqa: BLE001 (its cause is raised)
            torch.cuda.set_stream(before)
            _end_capture(pool)
            _free_generator()
            raise _first(exc) from None
        return graph.replay

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile for the shapes of the first call, in this process alone. Nothing is compiled yet."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.scratch / "inductor")
        config: Any = importlib.import_module("torch._inductor.config")
        config.compile_threads = 1  # and no processes
        functorch: Any = importlib.import_module("torch._functorch.config")
        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            functorch.force_non_lazy_backward_lowering = True  # in this thread, where it can be interrupted
        importlib.import_module("torch._dynamo").reset()  # of an earlier shape
        return torch.compile(function, dynamic=False)

    def allocated(self) -> int:
        """Bytes of tensors that are alive."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(self.device)

    def peak(self, call: Callable[[], object]) -> int:
        """The most that was allocated during the call, beyond what was before."""
        before = self.allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def crowded(self) -> bool:
        """Whether others hold a good part of the memory: what ran out might be had without them."""
        try:
            free, total = torch.cuda.mem_get_info(self.device)
        except RuntimeError:  # the context is broken, which nobody else's memory would mend
            return False
        others = total - free - torch.cuda.memory_reserved(self.device)
        return others > _CROWD * total

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _free_generator() -> None:
    """The device's random numbers too are taken to be of a capture that failed: nothing could be drawn any
    more. A copy of their state is of none."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with contextlib.suppress(AttributeError, RuntimeError):  # what went wrong is told, not this
        generator.graphsafe_set_state(generator.clone_state())


def _first(exc: BaseException) -> BaseException:
    """What went wrong, of errors that came of each other: a capture that is broken cannot be ended either."""
    before = None if exc.__suppress_context__ else exc.__context__
    return exc if before is None else _first(before)


def _end_capture(pool: Any) -> None:
    """Before 2.12 torch's allocator takes a capture that failed to be under way for good, and refuses to give
    memory back or to capture anything else (pytorch/pytorch#180395)."""
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        end = getattr(torch._C, name, None)
        if end is not None:
            with contextlib.suppress(RuntimeError):  # it knows already
                end(torch.cuda.current_device(), pool)
            return

"""An end to what takes too long, by the time for which this process could run: it may have been stopped
meanwhile, since somebody else timed kernels on its GPU."""

from __future__ import annotations

import signal
import time

AGAIN_SECONDS = 5.0  # a compiler that took the end of its time for an error of something else is told again
_TICKS, _TICK_MOST = 4, 1.0  # of all the seconds at least so many; seconds of one at most


class Limit:
    """In the main thread, TimeoutError in what takes longer; 0 seconds: as long as it takes. A compiler that
    catches it, or makes another error of it, is told again; `over` says that it was told.

    Seconds are ticks of a clock, of which no more than one comes in a time for which the process was stopped;
    or what the processor had to do, since none comes to a library that runs on."""

    def __init__(self, seconds: float, what: str) -> None:
        self.seconds = seconds
        self.told = f"{what} took more than {seconds:g} s"
        self.over = False
        self.tick = min(_TICK_MOST, seconds / _TICKS)

    def __enter__(self) -> None:
        self.due = self.seconds
        self.ticked = 0.0
        self.began = time.process_time()
        self.before = signal.signal(signal.SIGALRM, self._tick)
        signal.setitimer(signal.ITIMER_REAL, self.tick, self.tick)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)

    def _tick(self, _signal: int, _frame: object) -> None:
        self.ticked += self.tick
        spent = max(self.ticked, time.process_time() - self.began)
        if spent < self.due - self.tick / 2:  # sums of ticks are not exact
            return
        self.over = True
        self.due = spent + AGAIN_SECONDS
        raise TimeoutError(self.told)

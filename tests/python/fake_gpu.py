"""What operations/device_clock.py has for the benchmark, without a GPU: a clock that counts launches.

The end-to-end tests put this file in the place of that one.
"""

from __future__ import annotations

import torch
from kernel_agent import forward

CALL, LAUNCH = 0.01, 0.1  # milliseconds


class Gpu:
    """Kernels are interpreted; a call takes ten microseconds, and a hundred more for each launch."""

    mode = "interpret"
    l2 = 1 << 10
    copy_bytes = 1 << 14
    device = torch.device("cpu")

    def __init__(self, device="cpu", scratch=None, *, refuses="", late=0.0):
        self.refuses = refuses  # what cannot be captured, by the function's name
        self.late = late
        self.kept = 0

    def matmul_order(self, dtype):
        return 8

    def describe(self):
        return {"name": "fake", "capability": "sm_90", "l2_bytes": self.l2, "memory_bytes": 1 << 30}

    def time(self, call):
        """Of what is timed nobody looks at the values, and to interpret takes long: launches are counted."""
        launches = []
        with forward.launch_intercept(launches.append):
            made = call()
        return made, CALL + LAUNCH * len(launches), self.late

    def queue(self):
        self.clock = 0.0

    def mark(self):
        """Between two marks around a launch there is the launch."""
        self.clock += LAUNCH / 2
        return self.clock

    def between(self, start, end):
        return 2 * (end - start)

    def settle(self):
        pass

    def warm(self, call):
        call()

    def pool(self):
        return None

    def capture(self, call, pool):
        if self.refuses and call.__self__.function.__name__ == self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    def compile(self, function):
        def compiled(*args, **kwargs):
            return function(*args, **kwargs)

        return compiled

    def allocated(self):
        self.kept += 1000
        return self.kept

    def peak(self, call):
        call()
        return 4000

    def crowded(self):
        return True

    def release(self):
        pass

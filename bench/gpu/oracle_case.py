#!/usr/bin/env python3
"""Where an oracle's time goes: one case of an example, in float64 with gradients, step by step.

    bench/gpu/oracle_case.py FILE DIMS DTYPE [cuda|cpu]

    bench/gpu/oracle_case.py examples/attention.py \\
        '{"B": 4, "H": 32, "N": 4096, "D": 64, "causal": true}' float16

Prints JSON: seconds of the case, and of each step with the most memory that the GPU had allocated by then.
The device is waited for at each step. Files of this repository alone: nothing is jailed here.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sandbox"))
from kernel_agent.operations import oracle

STEPS = ("record", "replay", "gradients", "free", "reference")


def noted(name: str, steps: list[dict[str, Any]], on_gpu: bool) -> Callable[..., Any]:
    """A step of oracle.Case, with what it takes."""
    plain = getattr(oracle.Case, name)

    def step(self: oracle.Case, *args: Any, **kwargs: Any) -> Any:
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        made = plain(self, *args, **kwargs)
        if on_gpu:
            torch.cuda.synchronize()
        peak = round(torch.cuda.max_memory_allocated() / 1e9, 1) if on_gpu else None
        steps.append({"step": name, "seconds": round(time.monotonic() - started, 2), "peak_gb": peak})
        return made

    return step


def main() -> int:
    file, dims, dtype, *rest = sys.argv[1:]
    device = rest[0] if rest else "cuda"
    steps: list[dict[str, Any]] = []
    for name in STEPS:
        setattr(oracle.Case, name, noted(name, steps, device == "cuda"))
    case = {"id": 0, "dims": json.loads(dims), "seed": 5, "upstream": {"kind": "normal", "seed": 9}}
    request = {"file": file, "device": device, "dtype": dtype, "fd": False, "cases": [case]}
    with tempfile.TemporaryDirectory() as folder:
        (found,) = oracle.run(request, Path(folder))["cases"]
    made = {name: found[name] for name in ("ok", "seconds", "error") if name in found}
    print(json.dumps({**made, "steps": steps}, indent=1))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

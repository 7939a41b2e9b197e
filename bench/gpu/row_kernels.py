#!/usr/bin/env python3
"""What bounds two backwards by rows, measured: softmax of 8192 x 4096 and GEGLU of 8192 x 11008 in bfloat16.

    bench/gpu/row_kernels.py OUT.json

Softmax in five ways: dX from X with three sums over a row ("recomputed"), with the quotient taken out of the
last sum ("factored"), from X and a saved log-sum-exp ("saved"), from Y ("output"), and by persistent programs
that load ahead ("persistent"); beside them an addition of two such tensors ("add"), which moves as much.
GEGLU with a row in one block ("row"), with tiles of a row along an axis of their own ("tile"), and flat, one
tile after the other ("flat"), each with tanh in one branch, two, or as libdevice has it.

Each is captured in a CUDA graph and replayed 20 times, the L2 flushed in between; a row of the result is the
median in milliseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.libdevice import tanh

REPLAYS = 20
FLUSHED = 256 << 20  # bytes
ROWS, COLS, WIDE = 8192, 4096, 11008
WAYS = ("recomputed", "factored", "saved", "output")
TANH = ("two branches", "libdevice", "one branch")


@triton.jit
def softmax_backward(x_ptr, dy_ptr, lse_ptr, dx_ptr, N, WAY: tl.constexpr, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    offs, mask = row * N + cols, cols < N
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
    if WAY == 0:
        e = tl.exp(x - tl.max(x, axis=0))
        y = e * (1.0 / tl.sum(e, axis=0))
        dx = (dy - tl.sum(dy * y, axis=0)) * y
    elif WAY == 1:
        e = tl.exp(x - tl.max(x, axis=0))
        over = 1.0 / tl.sum(e, axis=0)
        dx = (dy - tl.sum(dy * e, axis=0) * over) * (e * over)
    elif WAY == 2:
        y = tl.exp(x - tl.load(lse_ptr + row))
        dx = (dy - tl.sum(dy * y, axis=0)) * y
    else:
        dx = (dy - tl.sum(dy * x, axis=0)) * x
    tl.store(dx_ptr + offs, dx, mask=mask)


@triton.jit
def softmax_persistent(x_ptr, dy_ptr, dx_ptr, M, N, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=STAGES):
        offs, mask = row * N + cols, cols < N
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs, mask=mask, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        over = 1.0 / tl.sum(e, axis=0)
        tl.store(dx_ptr + offs, (dy - tl.sum(dy * e, axis=0) * over) * (e * over), mask=mask)


@triton.jit
def tanh_of(x, HOW: tl.constexpr):
    far = 1.0 - 2.0 / (1.0 + tl.exp2(2.8853901 * x))
    if HOW == 0:
        square = x * x
        near = (1.3333334e-1 - 5.3968254e-2 * square) * square - 3.3333334e-1
        far = tl.where(square < 0.0625, x + x * square * near, far)
    elif HOW == 1:
        far = tanh(x)
    return far


@triton.jit
def geglu_backward(
    a_ptr, b_ptr, dc_ptr, da_ptr, db_ptr, N: tl.constexpr, HOW: tl.constexpr, TILED: tl.constexpr,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    if TILED:
        cols += tl.program_id(1) * BLOCK
    offs = tl.program_id(0).to(tl.int64) * (BLOCK if FLAT else N) + cols
    mask = (cols < N) | FLAT
    dc = tl.load(dc_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    t = tanh_of(0.7978845608028654 * (a + 0.044715 * a * a * a), HOW)
    g, dg = 0.5 * a * (1 + t), dc * b
    slope = (1.0 - t * t) * 0.7978845608028654 * (1 + 0.134145 * a * a)
    tl.store(da_ptr + offs, dg * 0.5 * (1 + t + a * slope), mask=mask)
    tl.store(db_ptr + offs, dc * g.to(tl.bfloat16), mask=mask)


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a replay of the call, captured."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flushed = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(REPLAYS):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def softmax_rows() -> list[dict[str, Any]]:
    x, dy = (torch.randn(ROWS, COLS, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dx, lse = torch.empty_like(x), torch.logsumexp(x.float(), 1)
    made: list[dict[str, Any]] = [{"op": "add", "ms": milliseconds(lambda: torch.add(x, dy, out=dx))}]
    for warps in (2, 4, 8, 16):
        for way, name in enumerate(WAYS):
            ms = milliseconds(
                lambda way=way, warps=warps: softmax_backward[(ROWS,)](
                    x, dy, lse, dx, COLS, WAY=way, BLOCK=COLS, num_warps=warps
                )
            )
            made.append({"op": "softmax", "way": name, "warps": warps, "ms": ms})
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for warps, stages, each in ((w, s, e) for w in (4, 8, 16) for s in (1, 2, 3) for e in (2, 4, 8)):
        ms = milliseconds(
            lambda warps=warps, stages=stages, each=each: softmax_persistent[(processors * each,)](
                x, dy, dx, ROWS, COLS, STAGES=stages, BLOCK=COLS, num_warps=warps
            )
        )
        made.append(
            {"op": "softmax", "way": "persistent", "warps": warps, "stages": stages, "each": each, "ms": ms}
        )
    return made


def geglu_rows() -> list[dict[str, Any]]:
    a, b, dc = (torch.randn(ROWS, WIDE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    da, db = torch.empty_like(a), torch.empty_like(b)
    layouts = [("row", 16384, (ROWS,), warps) for warps in (4, 8, 16)]
    layouts += [("tile", n, (ROWS, triton.cdiv(WIDE, n)), w) for n in (1024, 2048, 4096) for w in (4, 8)]
    layouts += [("flat", n, (ROWS * WIDE // n,), w) for n in (1024, 2048) for w in (4, 8)]
    made = []
    for how, name in enumerate(TANH):
        for layout, block, grid, warps in layouts:
            ms = milliseconds(
                lambda how=how, layout=layout, block=block, grid=grid, warps=warps: geglu_backward[grid](
                    a, b, dc, da, db, N=WIDE, HOW=how, TILED=layout == "tile", FLAT=layout == "flat",
                    BLOCK=block, num_warps=warps,
                )
            )  # fmt: skip
            made.append(
                {"op": "geglu", "tanh": name, "layout": layout, "block": block, "warps": warps, "ms": ms}
            )
    return made


def main() -> int:
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found["command"] = " ".join(sys.argv)
    Path(sys.argv[1]).write_text(json.dumps(found | {"rows": softmax_rows() + geglu_rows()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

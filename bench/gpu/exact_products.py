#!/usr/bin/env python3
"""Products of float32 by the precisions of tl.dot, with tiles of several sizes, beside cuBLAS.

    bench/gpu/exact_products.py RESULT.json

x (M, N) times the transpose of c (N, N), both random, as a cosine transform of rows has it: milliseconds by
triton.testing.do_bench, and the greatest and the root mean square of the differences from float64, over
the greatest and the root mean square of the products. Kernels are compiled at once, by as many processes,
and timed one after the other. Files of this repository alone: nothing is jailed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

SHAPES = ((16384, 1024), (8191, 1001))
LONGEST = 75  # seconds that compiling a kernel may take
ROWS = 512  # that are compared with float64
# Precision; rows, columns and what is summed over; warps, stages.
CONFIGS = (
    *(("ieee", *tile) for tile in (
        (64, 64, 16, 4, 3), (64, 64, 32, 4, 3), (128, 64, 16, 4, 3), (128, 64, 16, 8, 3), (128, 128, 16, 4, 3),
        (128, 128, 16, 8, 3), (128, 128, 32, 8, 3), (64, 128, 32, 8, 3), (128, 64, 32, 8, 2),
    )),
    *(("tf32x3", *tile) for tile in (
        (64, 64, 32, 4, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 128, 32, 4, 3), (128, 128, 32, 8, 3),
        (128, 64, 64, 8, 2),
    )),
    ("bf16x6", 128, 128, 32, 8, 3), ("bf16x3", 128, 128, 32, 8, 3), ("tf32", 128, 128, 32, 8, 3),
)  # fmt: skip


@triton.jit
def product_kernel(
    x_ptr, c_ptr, y_ptr, M, N, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = m[:, None].to(tl.int64) * N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + at + k[None, :], mask=(m[:, None] < M) & (k[None, :] < N), other=0.0)
        c = tl.load(c_ptr + n[:, None] * N + k[None, :], mask=(n[:, None] < N) & (k[None, :] < N), other=0.0)
        acc += tl.dot(x, tl.trans(c), input_precision=PRECISION)
    tl.store(y_ptr + at + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def launch(x: torch.Tensor, c: torch.Tensor, y: torch.Tensor, config: tuple[Any, ...]) -> None:
    (M, N), (precision, rows, columns, summed, warps, stages) = x.shape, config
    grid = (triton.cdiv(N, columns), triton.cdiv(M, rows))
    blocks = (rows, columns, summed)
    product_kernel[grid](x, c, y, M, N, precision, *blocks, num_warps=warps, num_stages=stages)


def operands(M: int, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator("cuda").manual_seed(0)
    return tuple(torch.randn(size, N, device="cuda", generator=made) for size in (M, N))


def errors(y: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    off = y[: len(expected)].double() - expected
    return {
        "greatest": (off.abs().max() / expected.abs().max()).item(),
        "rms": (off.square().mean().sqrt() / expected.square().mean().sqrt()).item(),
    }


def compiled() -> list[list[bool]]:
    """By shape and configuration, whether that compiles in time."""
    command = ["timeout", str(LONGEST), sys.executable, __file__, "compile"]
    started = [
        [subprocess.Popen([*command, str(i), str(j)], stderr=subprocess.DEVNULL) for j in range(len(CONFIGS))]
        for i in range(len(SHAPES))
    ]
    return [[one.wait() == 0 for one in row] for row in started]


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "compile":
        config = CONFIGS[int(sys.argv[3])]
        x, c = operands(256, SHAPES[int(sys.argv[2])][1])
        launch(x, c, torch.empty_like(x), config)
        torch.cuda.synchronize()
        return 0
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[dict[str, Any]] = []
    for (M, N), known in zip(SHAPES, compiled(), strict=True):
        x, c = operands(M, N)
        expected = x[:ROWS].double() @ c.double().t()
        ms = triton.testing.do_bench(lambda x=x, c=c: x @ c.t())
        rows.append({"M": M, "N": N, "by": "cuBLAS", "ms": round(ms, 4), **errors(x @ c.t(), expected)})
        for config, ready in zip(CONFIGS, known, strict=True):
            row = {
                "M": M,
                "N": N,
                "by": config[0],
                "tile": config[1:4],
                "warps": config[4],
                "stages": config[5],
            }
            if ready:
                y = torch.empty_like(x)
                ms = triton.testing.do_bench(lambda x=x, c=c, y=y, config=config: launch(x, c, y, config))
                row |= {"ms": round(ms, 4), **errors(y, expected)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    made = {"command": " ".join(sys.argv), "torch": torch.__version__, "triton": triton.__version__}
    made |= {"gpu": torch.cuda.get_device_name(), "results": rows}
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

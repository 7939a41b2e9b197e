#!/usr/bin/env python3
"""Products of halves by how their operands lie in memory, with tiles of several sizes, beside cuBLAS.

    bench/gpu/product_tiles.py RESULT.json

Of matrices of 4,096 rows and columns in bfloat16: A B^T ("nt") and A B ("nn"), as the gradient of a linear
layer's input is one of, and A^T B ("tn"), as that of its weights is. Milliseconds by triton.testing.do_bench,
medians. Kernels are compiled at once, by as many processes, and timed one after the other. Files of this
repository alone: nothing is jailed here.
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

SIZE = 4096
LAYOUTS = ("nt", "nn", "tn")
# Rows, columns and what is summed over; warps, stages.
TILES = (
    (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 4), (128, 128, 64, 4, 3), (64, 256, 64, 4, 4), (128, 128, 128, 8, 3),
)  # fmt: skip
PROCESSES = 12


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, N, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_offs = m[:, None] * stride_am + k[None, :] * stride_ak
        b_offs = k[:, None] * stride_bk + n[None, :] * stride_bn
        a = tl.load(a_ptr + a_offs, mask=(m[:, None] < N) & (k[None, :] < N), other=0.0)
        b = tl.load(b_ptr + b_offs, mask=(k[:, None] < N) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    mask = (m[:, None] < N) & (n[None, :] < N)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=mask)


def operands(layout: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    made = [torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return tuple(x.t() if side == "t" else x for x, side in zip(made, layout, strict=True))


def launch(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, tile: tuple[int, ...]) -> None:
    rows, columns, summed, warps, stages = tile
    product_kernel[(triton.cdiv(SIZE, rows), triton.cdiv(SIZE, columns))](
        a, b, c, SIZE, *a.stride(), *b.stride(),
        BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=summed, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def compile_part(part: int) -> None:
    """Leave the kernels of one process in Triton's cache."""
    cases = [(layout, tile) for layout in LAYOUTS for tile in TILES]
    for layout, tile in cases[part::PROCESSES]:
        a, b = operands(layout)
        launch(a, b, torch.empty_like(a), tile)


def ms(run: Any) -> float:
    return round(triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median"), 4)


def main(out: Path) -> None:
    parts = [subprocess.Popen([sys.executable, __file__, "--part", str(n)]) for n in range(PROCESSES)]
    if any(part.wait() for part in parts):
        raise SystemExit("a kernel did not compile, or not run")
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        a, b = operands(layout)
        c = torch.empty(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        rows.append({"layout": layout, "tile": "cuBLAS", "ms": ms(lambda a=a, b=b: torch.mm(a, b))})
        for tile in TILES:
            found = ms(lambda a=a, b=b, c=c, tile=tile: launch(a, b, c, tile))
            off = (c.float() - torch.mm(a, b).float()).norm() / c.float().norm()
            assert off < 1e-2, (layout, tile, float(off))
            rows.append({"layout": layout, "tile": list(tile), "ms": found})
    result = {
        "command": f"bench/gpu/product_tiles.py {out.name}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(),
        "size": SIZE,
        "results": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        compile_part(int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))

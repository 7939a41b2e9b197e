"""Forward files for the oracle's tests, and one case of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

from kernel_agent import forward, tensors
from kernel_agent.operations import oracle

KERNELS = sorted((Path(__file__).parent / "kernels").glob("*.py"))
HEAD = """\
import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 24}]


@triton.jit
def square_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(y_ptr + at, x * x, mask=at < n)


def square(x):
    y = torch.empty_like(x)
    square_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["N"], device=device, dtype=dtype),)


"""


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    scale = float(right.double().norm())
    return float((got.double() - right.double()).norm()) / scale if scale else float(got.double().norm())


def run_case(path: Path, scratch: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One case of the file's first shape; `case` and request fields may be overridden."""
    upstream = fields.pop("upstream", {"kind": "normal", "seed": 9})
    dims = fields.pop("dims", None) or forward.load(path).sweep[0].dims
    varied = {name: fields.pop(name) for name in ("layouts", "values", "closer") if name in fields}
    request = {"file": str(path), "device": "cpu", "target": "sm_90", "dtype": None, "fd": False} | fields
    request["cases"] = [{"id": 0, "dims": dims, "seed": 5, "upstream": upstream} | varied]
    (case,) = oracle.run(request, scratch)["cases"]
    return case, tensors.load(scratch / case["file"]) if case["ok"] else {}


def stub(write: Callable[..., Path], body: str, grads: str = "0", before: str = "") -> Path:
    """A forward file whose stub is `def stub(x): <body>`."""
    lines = "\n".join("    " + line for line in body.splitlines())
    return write(HEAD + before + f"@autodiff(inputs_require_grad=({grads},))\ndef stub(x):\n{lines}\n")


ROWS = HEAD.replace('torch.randn(dims["N"],', 'torch.randn(dims["N"], 5,').replace(
    "def square(x)", "@autodiff(inputs_require_grad=(0,))\ndef square(x)"
)

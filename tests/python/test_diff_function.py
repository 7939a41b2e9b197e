"""Derivatives of plain Triton functions: called in a small kernel, compared with torch's autograd in float64."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_agent import launches
from kernel_agent.differentiate import Refusal, grad
from sources import SANDBOX
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BOUND = 1e-12
M, N = 8, 16
torch_tl = types.SimpleNamespace(exp=torch.exp, erf=torch.erf, sum=lambda x, axis: x.sum(axis), where=torch.where)


@pytest.fixture(autouse=True)
def interpreted():
    launches.set_mode("interpret")


@triton.jit
def gelu(x, w):
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476)) * w


@triton.jit
def fan_out(x, y):
    a = tl.exp(x * y)
    b = a + x
    return a * b / (1 + b * b)


@triton.jit
def kinks(x, y):
    return tl.where(x > 0.2, tl.maximum(x, y), x * y)


@triton.jit
def squashed(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def gated(x, y):
    h = squashed(x) * y
    return h + squashed(h)


@triton.jit
def horner(x, c):
    y = c
    for i in tl.static_range(4):
        y = y * x + (i + 1)
    return y


@triton.jit
def scaled(x, w, s):
    """Rows of x with one weight per column, and a scalar."""
    centred = x - tl.sum(x, axis=1)[:, None] * s
    return centred * w


@triton.jit
def pair(x, y):
    return x * y, tl.exp(x) + y


@triton.jit
def powered(x, K: tl.constexpr):
    total = x
    for _ in tl.static_range(K):
        total += x * x
    return total if K > 1 else total * x


@triton.jit
def taped(x, K: tl.constexpr):
    y = x
    for _ in range(K):
        y = tl.exp(y) * x
    return y


def plain(x, y):
    return x / y


@triton.jit
def loading(x_ptr, n):
    at = tl.arange(0, 16)
    return tl.load(x_ptr + at) * n


@triton.jit
def helper_with_a_store(x, p):
    tl.store(p, x)
    return x


@triton.jit
def storing(x, p):
    return helper_with_a_store(x, p) * 2


@triton.jit
def numbered(x):
    return x * tl.program_id(0)


@triton.jit
def counting(x):
    return tl.atomic_add(x, 1)


@triton.jit
def nothing(x):
    y = x * 2  # noqa: F841


def launching(x):
    gelu[(1,)](x)
    return x


KERNEL = """
import triton
import triton.language as tl
@triton.jit
def kernel({pointers}):
    rows, cols = tl.arange(0, {M})[:, None], tl.arange(0, {N})
    block = rows * {N} + cols
    {assigned} = call({loads})
    {stores}
"""
AT = {(): "0", (N,): "cols", (M, N): "block", (M, 1): "rows"}


def run(tmp_path: Path, bwd: Any, inputs: list[torch.Tensor], upstream: list[torch.Tensor], wrt: list[int], tail: str = ""):
    """What `bwd` returns for one block of each input, stored by a kernel."""
    given = [*inputs, *upstream]
    outputs = [torch.full_like(inputs[i], float("nan")) for i in wrt]
    pointers = [f"p{i}" for i in range(len(given))] + [f"q{i}" for i in range(len(outputs))]
    loads = ", ".join(f"tl.load(p{i} + {AT[tuple(t.shape)]})" for i, t in enumerate(given))
    stores = "\n    ".join(f"tl.store(q{i} + {AT[tuple(t.shape)]}, d{i})" for i, t in enumerate(outputs))
    assigned = ", ".join(f"d{i}" for i in range(len(outputs)))
    text = KERNEL.format(M=M, N=N, pointers=", ".join(pointers), assigned=assigned, loads=loads + tail, stores=stores)
    file = tmp_path / "kernel.py"
    file.write_text(text)
    names: dict[str, Any] = {"call": bwd, "__name__": "kernel_of_a_test"}
    exec(compile(text, str(file), "exec"), names)
    names["kernel"][(1,)](*given, *outputs)
    return outputs


def as_torch(fn: Any, **names: Any) -> Any:
    """The same function over torch's operations."""
    names = {"tl": torch_tl, "squashed": torch.sigmoid, **names}
    return types.FunctionType(fn.fn.__code__, {**names, "__builtins__": __builtins__})


def horner_torch(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return c * x**4 + x**3 + 2 * x**2 + 3 * x + 4


def kinks_torch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0.2, torch.maximum(x, y), x * y)


ONE = {"x": (N,), "y": (N,)}
CASES: dict[str, tuple[Any, Any, dict[str, Any] | None]] = {
    "gelu": (gelu, as_torch(gelu), None),
    "fan_out": (fan_out, as_torch(fan_out), None),
    "kinks": (kinks, kinks_torch, None),
    "nested_helper": (gated, as_torch(gated), None),
    "static_loop": (horner, horner_torch, {"x": (M, N), "c": ()}),
    "broadcast": (scaled, as_torch(scaled), {"x": (M, N), "w": (N,), "s": ()}),
    "column": (fan_out, as_torch(fan_out), {"x": (M, N), "y": (M, 1)}),
    "two_results": (pair, as_torch(pair), {"x": (M, N), "y": (N,)}),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_function__gradients__equal_autograd(name: str, tmp_path: Path) -> None:
    fn, reference, shapes = CASES[name]
    bwd = grad(fn, shapes=shapes, dtype="float64")
    torch.manual_seed(len(name))
    sizes = [(N,), (N,)] if shapes is None else list(shapes.values())
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in sizes]
    out = reference(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    upstream = [torch.randn_like(o) for o in outs]
    want = torch.autograd.grad(outs, inputs, upstream)
    got = run(tmp_path, bwd, [i.detach() for i in inputs], upstream, list(range(len(inputs))))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).norm() <= BOUND * theirs.norm(), bwd.source

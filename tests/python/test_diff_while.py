"""`while` loops that count, however they do, are loops over a range; their states have gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from diff_support import assert_right, draft
from kernel_agent import errors

SOURCE = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff

SWEEP = [{"N": 40, "k": 5}]


@triton.jit
def turn_kernel(x_ptr, y_ptr, n, k, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    y = x
LOOP
    tl.store(y_ptr + at, y * (1 + i), mask=at < n)


@autodiff(inputs_require_grad=(0,))
def turned(x, k):
    x = x.contiguous()
    y = torch.empty_like(x)
    turn_kernel[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), k, BLOCK=16)
    return y


def make_args(dims, device="cuda", dtype=torch.float32):
    return torch.rand(dims["N"], device=device, dtype=dtype) + 0.5, dims["k"]
"""
LOOPS = {
    "up": "i = 0\nwhile i < k:\n    y = tl.sin(y) * x * (i + 1) * 0.3\n    i += 1",
    "up, assigned": "i = 0\nwhile i < k:\n    y = tl.sin(y) * x * (i + 1) * 0.3\n    i = i + 2",
    "up to and with": "i = 1\nwhile i <= k:\n    y = tl.sin(y) * x * i * 0.3\n    i += 2",
    "turned": "i = 1\nwhile k >= i:\n    y = tl.sin(y) * x * i * 0.3\n    i += 2",
    "down": "i = k\nwhile i > 0:\n    y = tl.sin(y) * x * i * 0.3\n    i -= 1",
    "down to and with": "i = k\nwhile i >= 0:\n    y = tl.sin(y) * x * (i + 1) * 0.3\n    i = i - 2",
    "counted first": "i = 0\nwhile i < k:\n    i += 1\n    y = tl.sin(y) * x * i * 0.3",
    "counted in between": "i = k\nwhile i > 1:\n    y = y * i\n    i -= 3\n    y = tl.sin(y) * x + i",
}
REFUSED = {
    "halved": "i = k\nwhile i > 0:\n    y = tl.sin(y) * x\n    i = i // 2",
    "counted in a branch": "i = 0\nwhile i < k:\n    y = tl.sin(y) * x\n    if n > 3:\n        i += 1\n    else:\n        i += 2",
    "counted twice": "i = 0\nwhile i < k:\n    i += 1\n    y = tl.sin(y) * x\n    i += 1",
    "of an end that moves": "i, end = 0, k\nwhile i < end:\n    y = tl.sin(y) * x\n    i += 1\n    end = end - 1",
    "of a step that moves": "i, s = 0, 1\nwhile i < k:\n    y = tl.sin(y) * x\n    i += s\n    s = s + 1",
    "towards nothing": "i, e = 0, 1.0\nwhile e > 0.1:\n    y = tl.sin(y) * x\n    e = e * tl.max(tl.sin(y), axis=0)",
}  # fmt: skip


def source_of(loop: str) -> str:
    return SOURCE.replace("LOOP", "\n".join("    " + line for line in loop.splitlines()))


@pytest.mark.parametrize("name", sorted(LOOPS))
def test_while_loop_that_counts__has_a_gradient(name: str, write: Callable[[str], Path]) -> None:
    file = write(source_of(LOOPS[name]))
    result = draft(file, {"N": 40, "k": 5})
    assert_right(file, result, [({"N": n, "k": k}, "normal") for n, k in ((40, 5), (7, 1), (16, 0), (16, 6))])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_while_loop_that_counts_otherwise__is_refused(name: str, write: Callable[[str], Path]) -> None:
    file = write(source_of(REFUSED[name]))
    with pytest.raises(errors.Unusable, match="cannot be run backwards") as refused:
        draft(file, {"N": 40, "k": 5})
    assert "while" in file.read_text().splitlines()[(refused.value.line or 0) - 1]

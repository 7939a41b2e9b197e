"""Programs that part in loops and branches, evaluated together, against each program evaluated alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_agent.torch_tl import EXACT, launch
from kernel_agent.torch_tl.memory import Memory
from test_torch_tl import Evaluation, compile_kernel

PROGRAMS, BLOCK = 7, 8
HELPERS = """
@triton.jit
def summed(x_ptr, first, last, at, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(first, last):
        total += tl.load(x_ptr + row * BLOCK + at) * row
    return total


@triton.jit
def larger(a, b):
    if a > b:
        return a
    return b


"""
HEAD = """@triton.jit
def kernel(x_ptr, n_ptr, y_ptr, z_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    n = tl.load(n_ptr + pid)
    x = tl.load(x_ptr + pid * BLOCK + at)
    y = x * 0.5
"""
FOOT = "    tl.store(y_ptr + pid * BLOCK + at, y)\n"
# Statements between; n differs from program to program and is 0 in one of them.
BODIES = {
    "loop": "for i in range(n):\n    y = y * x + i",
    "loop from another start": "for i in range(n, 2 * n + pid, 2):\n    y += tl.load(x_ptr + i + at) * i",
    "loop down": "for i in range(n, 0, -1):\n    y = y * 0.5 + i",
    "loop in a loop": "for i in range(n):\n    for j in range(i + pid):\n        y = y * 0.9 + x * j",
    "variable of a loop, read later": "for i in range(n + 1):\n    y = y * x\ny += i",
    "what only a loop assigns": "for i in range(n):\n    t = x * i\n    y += t",
    "what an earlier loop assigned": """\
for i in range(n):
    t = x * i
    y += t
for i in range(pid):
    t = x + i
    y += t""",
    "while": "k = n\nwhile k > 0:\n    y = y * 0.5 + x\n    k -= 2",
    "while in a loop": "k = pid\nfor i in range(n):\n    while k < 3 * i:\n        y += x\n        k += 1",
    "branch": "if n > 2:\n    y = y * x\nelse:\n    y = y - x",
    "branch without another": "if n > 2:\n    y = y * x",
    "what only one side of a branch in a loop assigns": """\
for i in range(4):
    if n > i:
        t = x * i
        y += t""",
    "branches in turn": "if n > 4:\n    y *= x\nelif n > 2:\n    y += x\nelse:\n    y = -x",
    "branch in a loop": "for i in range(6):\n    if i < n:\n        y = y * x\n    else:\n        y += i",
    "loop in a branch": "if n % 2 == 0:\n    for i in range(n):\n        y = y * x\n    y += pid",
    "break all together": "for i in range(n):\n    if i == 2:\n        break\n    y = y * x",
    "break of some": "for i in range(6):\n    if i >= n:\n        break\n    y = y * x",
    "continue": "for i in range(n):\n    if i == 1:\n        continue\n    y = y * x + i",
    "pointers that move": """\
p = x_ptr + at
for i in range(n):
    y += tl.load(p) * i
    p += BLOCK
y += tl.load(p)""",
    "pointers of a branch": "p = x_ptr + at\nif n > 2:\n    p = x_ptr + BLOCK + at\ny += tl.load(p)",
    "pointers to two tensors": "p = x_ptr + at\nif n > 2:\n    p = z_ptr + at\ny += tl.load(p)",
    "block pointer": """\
b = tl.make_block_ptr(x_ptr, (7, BLOCK), (BLOCK, 1), (0, 0), (1, BLOCK), (1, 0))
for i in range(n):
    y += tl.reshape(tl.load(b), [BLOCK]) * i
    b = tl.advance(b, (1, 0))
y += tl.reshape(tl.load(b), [BLOCK])""",
    "tuple": "t = (x, n)\nfor i in range(n):\n    t = (t[0] * y, t[1] + 1)\ny = t[0] * t[1]",
    "store inside": "for i in range(n):\n    tl.store(z_ptr + pid * 64 + i * BLOCK + at, y)\n    y *= x",
    "atomic inside": "for i in range(n):\n    tl.atomic_add(z_ptr + at, y * i)\n    y = y * x",
    "helper with a loop": "y += summed(x_ptr, n // 2, n, at, BLOCK)",
    "helper that returns early": "y += larger(n, 3) * x",
    "and": "if (n > 2) and (pid < 5):\n    y = y * x",
    "one side has another type": "s = 1\nif n > 2:\n    s = tl.sum(x)\n    y += s",
    "one side has another type, read later": "s = 1\nif n > 2:\n    s = tl.sum(x)\ny = y * s",
    "reduction": "for i in range(n):\n    y = y / (1 + tl.sum(y * y)) + tl.max(x) * i",
    "constant": "if n > 2:\n    k = 3\nelse:\n    k = 3\ny = y * k",
    "return in a loop": "for i in range(n):\n    if i == 4:\n        return\n    y = y * x",
    "early return": "if n > 5:\n    return\nfor i in range(n):\n    y = y * x",
}
APART = (
    "break of some",
    "early return",
    "return in a loop",
    "pointers to two tensors",
    "helper that returns early",
    "one side has another type, read later",
)


def inputs() -> dict[str, torch.Tensor]:
    x = torch.randn((PROGRAMS + 1) * BLOCK, generator=torch.Generator().manual_seed(5))
    n = torch.tensor([3, 0, 6, 1, 3, 5, 2], dtype=torch.int32)
    return {
        "x_ptr": x.requires_grad_(),
        "n_ptr": n,
        "y_ptr": torch.zeros(PROGRAMS * BLOCK),
        "z_ptr": torch.zeros(PROGRAMS * 64),
    }


def evaluated(kernel: Any) -> tuple[list[torch.Tensor], Memory]:
    run = Evaluation(EXACT, **inputs())
    run.launch(kernel, (PROGRAMS,), BLOCK=BLOCK)
    outputs = [out for out in (run["y_ptr"], run["z_ptr"]) if out.requires_grad]
    weights = [torch.linspace(-1, 1, out.numel(), dtype=torch.float64) for out in outputs]
    (grad,) = torch.autograd.grad(outputs, run.leaves["x_ptr"], weights)
    return [out.detach() for out in outputs] + [grad], run.memory


def kernel_of(name: str, folder: Path) -> Any:
    body = "".join(f"    {line}\n" for line in BODIES[name].splitlines())
    return compile_kernel(HELPERS + HEAD + body + FOOT, folder)


@pytest.mark.parametrize("name", BODIES)
def test_programs_that_part__have_what_each_has_alone(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    kernel = kernel_of(name, tmp_path)
    begun: list[int] = []
    plain = Memory.begin_group

    def begin(self: Memory, programs: torch.Tensor) -> None:
        begun.append(programs.numel())
        plain(self, programs)

    monkeypatch.setattr(Memory, "begin_group", begin)
    together, memory = evaluated(kernel)
    assert (begun == [PROGRAMS]) is (name not in APART), begun
    monkeypatch.setitem(launch.MOST_TOGETHER, "cpu", 1)
    alone, other = evaluated(kernel)
    for one, two in zip(together, alone, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13)
    assert memory.counts == other.counts
    assert together[-1].any()

"""The three kinds of mistake that once cost the most turns, each made by a model that does not know better
unless its question says so.

A script has a step for each state of its knowledge: what is right, for a question that says why; the mistake,
for one that does not; and the repair, for one that tells what went wrong. So the number of questions is what
the questions are worth. `without` is what the rules said nothing of then: a run whose prompts lack it shows
that it is the rule that saves the turn.
"""

from __future__ import annotations

from typing import Any, NamedTuple

FORWARD = '''"""y = x * w, row by row; x may lie in memory in any way."""

import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def scale_kernel(x_ptr, w_ptr, y_ptr, N, stride_m, stride_n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * stride_m + cols * stride_n, mask=mask, other=0.0)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(y_ptr + row * N + cols, x * w, mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def scale(x, w):
    M, N = x.shape
    y = torch.empty((M, N), device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(N)
    scale_kernel[(M,)](x, w.contiguous(), y, N, x.stride(0), x.stride(1), BLOCK=block)
    return y


SWEEP = [{"M": 4, "N": 24}, {"M": 6, "N": 33}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["N"], device=device, dtype=dtype)
    return (x, torch.randn(dims["N"], device=device, dtype=dtype))
'''

RIGHT = """# dx: same_tile_pointwise; dw: partials_then_reduce, a partial for half of the rows
@triton.jit
def scale_bwd_kernel(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, M, N, stride_m, stride_n, SPAN, BLOCK: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    first = tl.program_id(0).to(tl.int64) * SPAN
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(0, SPAN):
        row = first + step
        live = mask & (row < M)
        dy = tl.load(dy_ptr + row * N + cols, mask=live, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride_m + cols * stride_n, mask=live, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * N + cols, dy * w, mask=live)
        dw += dy * x
    tl.store(dw_ptr + tl.program_id(0) * N + cols, dw, mask=mask)


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return scale(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy, w = dy.contiguous(), w.contiguous()
        M, N = x.shape
        span = max(M // 2, 1)
        parts = triton.cdiv(M, span)
        dx = torch.empty((M, N), device=x.device, dtype=x.dtype)
        dw = torch.empty((parts, N), device=x.device, dtype=torch.float32)
        scale_bwd_kernel[(parts,)](
            dy, x, w, dx, dw, M, N, x.stride(0), x.stride(1), span, BLOCK=triton.next_power_of_2(N)
        )
        return dx, dw.sum(0).to(w.dtype)


def scale_autograd(x, w):
    return ScaleFunction.apply(x, w)
"""


class Kind(NamedTuple):
    steps: list[dict[str, Any]]
    then: int  # questions that were needed before
    now: int
    without: str = ""  # of prompts/system.md, as it begins there; of a failure there is no such text


def answer(code: str, *when: str) -> dict[str, Any]:
    return {"text": f"The backward.\n\n```python\n{code}```\n"} | ({"when": list(when)} if when else {})


def changed(old: str, new: str, code: str = RIGHT) -> str:
    assert old in code
    return code.replace(old, new)


LOOP_VARIABLE = changed("row = first + step", "row = first + step.to(tl.int64)")
AS_A_WHOLE = changed("x.stride(0), x.stride(1), span", "N, 1, span")
NO_ROWS = changed("max(M // 2, 1)", "M // 2")
GUESS = changed("triton.next_power_of_2(N)", "max(16, triton.next_power_of_2(N))", NO_ROWS)

KINDS = {
    "loop variable": Kind(
        [
            answer(RIGHT, "loop variable of a `range` is a plain Python int"),
            answer(LOOP_VARIABLE),
            answer(RIGHT, "'int' object has no attribute 'to'"),
        ],
        then=2,
        now=1,
        without="17. The loop variable",
    ),
    "inputs that lie in any way": Kind(
        [
            answer(RIGHT, "Inputs and upstream gradients may lie in memory in any way"),
            answer(AS_A_WHOLE),
            answer(RIGHT, "# What is wrong"),
        ],
        then=2,
        now=1,
        without="7. Inputs and upstream",
    ),
    "raise on a hidden shape": Kind(
        [
            answer(RIGHT, "raised: ZeroDivisionError at line"),
            answer(NO_ROWS),
            answer(GUESS, "a hidden shape (one"),
            answer(RIGHT, "max(16, triton.next_power_of_2(N))"),
        ],
        then=3,
        now=2,
    ),
}

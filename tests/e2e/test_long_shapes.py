"""A loop over blocks that scaled shapes leave with a single turn is judged where it turns more than once."""

from __future__ import annotations

import json
import subprocess

from conftest import Agent

PAIR = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def square_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=0.0)
        tl.store(y_ptr + row * N + at, x * x, mask=at < N)


@autodiff(inputs_require_grad=(0,))
def square(x):
    M, N = x.shape
    y = torch.empty_like(x)
    square_kernel[(M,)](x, y, N, BLOCK=min(1024, triton.next_power_of_2(N)))
    return y


SWEEP = [{"M": 2048, "N": 8192}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


@triton.jit
def square_backward_kernel(x_ptr, dy_ptr, dx_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, mask=at < N, other=0.0)
        dy = tl.load(dy_ptr + row * N + at, mask=at < N, other=0.0)
        tl.store(dx_ptr + row * N + at, 2 * x * dy, mask=at < N)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return square(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        M, N = x.shape
        x, dy = x.contiguous(), dy.contiguous()
        dx = torch.zeros_like(x)
        square_backward_kernel[(M,)](x, dy, dx, N, BLOCK=min(1024, triton.next_power_of_2(N)))
        return dx


def square_autograd(x):
    return Square.apply(x)
"""
# The block of the first turn, whatever `start` is.
ONE_TURN = (
    "dy = tl.load(dy_ptr + row * N + at, mask=at < N",
    "dy = tl.load(dy_ptr + row * N + at - start, mask=at < N",
)


def test_long_shape__shows_what_goes_wrong_in_the_second_turn_of_a_loop(agent: Agent) -> None:
    wrong = PAIR.replace(*ONE_TURN)
    assert wrong != PAIR
    results = []
    for name, text in (("right.py", PAIR), ("wrong.py", wrong)):
        (agent.folder / name).write_text(text)
        done = subprocess.run(
            agent.command("check", agent.folder / name, "--json", "--quiet"),
            cwd=agent.folder,
            env=agent.env,
            capture_output=True,
            text=True,
            check=False,
        )
        results.append(json.loads(done.stdout))
    right, failed = results
    assert right["verdict"] == "verified"
    assert failed["verdict"] == "not_verified"
    shapes = failed["shapes"]
    assert shapes["passed"] == shapes["required"] and shapes["hidden_passed"] == shapes["hidden"] - 1
    assert "(long)" in failed["failures"]

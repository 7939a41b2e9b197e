"""Tensors of N by N, of which no product of sizes tells: what some fifty cases are asked of is small."""

from __future__ import annotations

import sys
from math import prod

import fake_card
from conftest import Agent

PAIR = """import torch
import triton
import triton.language as tl
from kernel_agent import autodiff


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, factor * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def scaled(x, factor):
    y = torch.empty_like(x)
    scale_kernel[(triton.cdiv(x.numel(), 65536),)](x, y, x.numel(), factor, BLOCK=65536)
    return y


@autodiff(inputs_require_grad=(0,))
def scores(x):
    return scaled(x.contiguous(), 0.5)


SWEEP = [{"B": 2, "N": 1420}]


def make_args(dims, device="cuda", dtype=torch.float32):
    return (torch.randn(dims["B"], dims["N"], dims["N"], device=device, dtype=dtype),)


# ---- backward ----


class Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scores(x)

    @staticmethod
    def backward(ctx, dy):
        return scaled(dy.contiguous(), 0.5)


def scores_autograd(x):
    return Scores.apply(x)
"""
BYTES = '"bytes": (scratch / file).stat().st_size'


def test_square_tensors__are_asked_about_at_a_small_size(agent: Agent) -> None:
    fake_card.install(agent)
    oracle = agent.folder / "share/sandbox/kernel_agent/operations/oracle.py"
    assert BYTES in oracle.read_text()
    oracle.write_text(oracle.read_text().replace(BYTES, f"{BYTES} * 4"))
    pair = agent.folder / "scores.py"
    pair.write_text(PAIR)
    done = agent("check", pair, "--device", "cuda", "--python", sys.executable, "--json")
    assert done.code == 0 and done.result["verdict"] == "verified", done.err
    sizes = {kind: [] for kind in ("required", "hidden")}
    for one in done.result["per_shape"]:
        sizes[one["kind"]].append(prod(one["shape"].values()) * max(one["shape"].values()))
    assert sizes["required"] == [2 * 1420 * 1420]
    assert sum(size > 4e6 for size in sizes["hidden"]) <= 3, done.result["per_shape"]
    assert done.result["variants_on"]["N"] < 1000

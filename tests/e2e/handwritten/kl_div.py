"""KL divergence of two log-probabilities: a dataclass holds the settings, and the forward makes the gradient,
which a kernel scales."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

Reduction = Literal["batchmean", "sum"]


@dataclass(frozen=True)
class Settings:
    reduction: Reduction = "batchmean"
    block: int = 32

    def scale(self, rows: int) -> float:
        return 1.0 / rows if self.reduction == "batchmean" else 1.0


@triton.jit
def kl_kernel(p_ptr, q_ptr, loss_ptr, dp_ptr, n, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    loss = 0.0
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n
        p = tl.load(p_ptr + row * n + cols, mask=mask, other=0.0)
        q = tl.load(q_ptr + row * n + cols, mask=mask, other=-float("inf"))
        target = tl.exp(q)
        term = tl.where(mask, target * (tl.where(mask, q, 0.0) - p), 0.0)
        loss += tl.sum(term, axis=0) * scale
        tl.store(dp_ptr + row * n + cols, -target * scale, mask=mask)
    tl.store(loss_ptr + row, loss)


@triton.jit
def scale_kernel(from_ptr, to_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < n, other=0.0) * factor, mask=i < n)


class KLDivFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_p: torch.Tensor, log_q: torch.Tensor, settings: Settings) -> torch.Tensor:
        log_p, log_q = log_p.contiguous(), log_q.contiguous()
        rows, n = log_p.shape
        if rows > 1 << 20:
            warnings.warn("many rows", stacklevel=2)
        loss = torch.empty(rows, dtype=torch.float32, device=log_p.device)
        dp = torch.empty_like(log_p)
        kl_kernel[(rows,)](log_p, log_q, loss, dp, n, settings.scale(rows), BLOCK=settings.block)
        ctx.save_for_backward(dp)
        ctx.settings = settings
        return loss.sum()

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dp,) = ctx.saved_tensors
        block = ctx.settings.block
        scaled = torch.empty_like(dp)
        scale_kernel[(triton.cdiv(dp.numel(), block),)](dp, scaled, grad_output, dp.numel(), BLOCK=block)
        return scaled, None, None


def kl_div(log_p: torch.Tensor, log_q: torch.Tensor, reduction: Reduction = "batchmean") -> torch.Tensor:
    return KLDivFunction.apply(log_p, log_q, Settings(reduction))


SWEEP = [{"M": 5, "N": 24}]


def make_args(dims, device="cuda", dtype=torch.float32):
    p, q = (torch.randn(dims["M"], dims["N"], device=device, dtype=dtype) for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1)

"""Keeping a part of each sample's tokens, as an encoder of masked pictures does with what it may see.

Forward    y_bi = x_{b, k_bi},  k_b a list of different tokens of sample b
Backward   dx_bt = dy_bi if t = k_bi for some i, else 0: as the list has no token twice, there is no sum

Forward schedule: a program copies one row.
Backward schedule: the usual way fills dx with zeros and then writes the kept rows over them: rows written
twice, by two launches in this order. Here a small table has for each token its place in the list, or -1: T
numbers a sample. The owner of a row of dx looks up its place, and stores either a row of dy or zeros: one
pass, every row once, and a dropped token reads nothing. The table is made in the forward's launch, where
each program knows a pair (i, k_bi); only its -1 are a fill of their own.

op: index_select
schedule: index_or_seed_replay, gather_transpose
difficulty: 1
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


BLOCK = 512


@triton.jit
def keep_kernel(x_ptr, k_ptr, y_ptr, place_ptr, T, K, D, SAVE: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = row // K * T + tl.load(k_ptr + row)
    if SAVE:
        tl.store(place_ptr + token, (row % K).to(tl.int32), mask=part == 0)
    d = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * D + d, mask=d < D, other=0.0)
    tl.store(y_ptr + row * D + d, x, mask=d < D)


def keep_forward(x, k, save):
    (B, T, D), K = x.shape, k.shape[1]
    if k.shape[0] != B or K > T:
        raise ValueError(f"lists {tuple(k.shape)} of different tokens for {tuple(x.shape)}")
    y = torch.empty((B, K, D), device=x.device, dtype=x.dtype)
    place = torch.full((B, T), -1, device=x.device, dtype=torch.int32) if save else None
    keep_kernel[(B * K, triton.cdiv(D, BLOCK))](x, k, y, place, T, K, D, SAVE=save, BLOCK=BLOCK)
    return y, place


@autodiff(inputs_require_grad=(0,))
def keep_tokens(x, k):
    """x: (B, T, D); k: int64 (B, K), different tokens for each sample."""
    return keep_forward(x.contiguous(), k.contiguous(), False)[0]


def reference(x, k):
    return torch.gather(x, 1, k[:, :, None].expand(-1, -1, x.shape[2]))


SWEEP = [{"B": 512, "T": 197, "K": 49, "D": 768}, {"B": 67, "T": 300, "K": 299, "D": 601}]
SWEEP_CPU = [{"B": 3, "T": 12, "K": 5, "D": 30}, {"B": 2, "T": 7, "K": 7, "D": 600}]


def make_args(dims, device="cuda", dtype=torch.float32):
    B, T, D = dims["B"], dims["T"], dims["D"]
    order = torch.rand(B, T, device=device).argsort(dim=1)
    return torch.randn(B, T, D, device=device, dtype=dtype), order[:, : dims["K"]]


# ---- backward ----


@triton.jit
def spread_kernel(dy_ptr, place_ptr, dx_ptr, T, K, D, BLOCK: tl.constexpr):
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(place_ptr + token)
    there = tl.where(i >= 0, D, 0)  # columns to take from dy
    dy = tl.load(dy_ptr + (token // T * K + i) * D + d, mask=d < there, other=0.0)
    tl.store(dx_ptr + token * D + d, dy, mask=d < D)


class KeepTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        y, place = keep_forward(x.contiguous(), k.contiguous(), True)
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx, dy):
        (place,) = ctx.saved_tensors
        (B, T), (_, K, D) = place.shape, dy.shape
        dx = torch.empty((B, T, D), device=dy.device, dtype=dy.dtype)
        grid = (B * T, triton.cdiv(D, BLOCK))
        spread_kernel[grid](dy.contiguous(), place, dx, T, K, D, BLOCK=BLOCK)
        return dx, None


def keep_tokens_autograd(x, k):
    return KeepTokens.apply(x, k)

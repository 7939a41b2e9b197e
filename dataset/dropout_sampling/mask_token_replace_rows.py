"""Masked modelling: some tokens are replaced by a learned vector before the encoder sees them.

Forward    y_t = e if u_t < p else x_t,  u_t the t-th number of the Philox stream of a seed, for a whole token
Backward   dx_t = 0 if u_t < p else dy_t;   de = sum of dy_t over the replaced tokens

Forward schedule: a program owns a token, draws its number, and loads one row: of x, or e.
Backward schedule: a program walks a part of the tokens with a sum for de in registers. For each token it
draws again and reads its row of dy once, which then goes to one of two places: to dx, or into the sum with
zeros for dx. The parts are stored as slots and added by a second kernel; e, one row that a third of all
tokens have read, would be the worst address for atomics. No mask is kept.

op: mask_token
schedule: index_or_seed_replay, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def replace_kernel(x_ptr, e_ptr, y_ptr, D, p, seed, BLOCK: tl.constexpr):
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    keep = tl.where(tl.rand(seed, t) < p, 0, D)  # columns to take from x
    x = tl.load(x_ptr + t * D + d, mask=d < keep, other=0.0)
    e = tl.load(e_ptr + d, mask=(d >= keep) & (d < D), other=0.0)
    tl.store(y_ptr + t * D + d, tl.where(d < keep, x, e), mask=d < D)


@autodiff(inputs_require_grad=(0, 1))
def mask_tokens(x, e, p, seed):
    """x: (T, D); e: (D)."""
    T, D = x.shape
    if e.shape != (D,) or D > 16384 or not 0 <= p <= 1:
        raise ValueError(f"x {tuple(x.shape)}, e {tuple(e.shape)}, p {p}; rows are one tile, up to 16384")
    y = torch.empty((T, D), device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(D)
    replace_kernel[(T,)](x.contiguous(), e.contiguous(), y, D, p, seed, BLOCK=BLOCK)
    return y


def reference(x, e, p, seed):
    ones = torch.ones((x.shape[0], 1), device=x.device)
    kept = mask_tokens(ones, torch.zeros(1, device=x.device), p, seed) > 0
    return torch.where(kept, x, e)


SWEEP = [{"T": 65536, "D": 1024}, {"T": 10007, "D": 700}]
SWEEP_CPU = [{"T": 24, "D": 45}, {"T": 140, "D": 10}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["T"], dims["D"], device=device, dtype=dtype)
    return (x, torch.randn(dims["D"], device=device, dtype=dtype)), {"p": 0.4, "seed": 20}


# ---- backward ----

MAX_PARTS = 512


@triton.jit
def replace_backward_kernel(dy_ptr, dx_ptr, slots_ptr, T, D, p, seed, parts, BLOCK: tl.constexpr):
    part, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    de = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(tl.cdiv(T - part, parts)):
        t = part + step * parts
        keep = tl.where(tl.rand(seed, t) < p, 0, D)
        dy = tl.load(dy_ptr + t * D + d, mask=d < D, other=0.0)
        de += tl.where(d < keep, 0.0, dy.to(tl.float32))
        tl.store(dx_ptr + t * D + d, tl.where(d < keep, dy, 0.0), mask=d < D)
    tl.store(slots_ptr + part * D + d, de, mask=d < D)


@triton.jit
def sum_slots_kernel(slots_ptr, de_ptr, parts, D, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([SLOTS, BLOCK], dtype=tl.float32)
    for start in range(0, parts, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        mask = (slot[:, None] < parts) & (d[None, :] < D)
        total += tl.load(slots_ptr + slot[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(de_ptr + d, tl.sum(total, axis=0).to(de_ptr.dtype.element_ty), mask=d < D)


class MaskTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, e, p, seed):
        ctx.p, ctx.seed = p, seed
        return mask_tokens(x, e, p, seed)

    @staticmethod
    def backward(ctx, dy):
        (T, D), needs = dy.shape, ctx.needs_input_grad
        parts = min(T, MAX_PARTS)
        dy = dy.contiguous()
        dx, de = torch.empty_like(dy), torch.empty(D, device=dy.device, dtype=dy.dtype)
        slots = torch.empty((parts, D), device=dy.device, dtype=torch.float32)
        BLOCK = triton.next_power_of_2(D)
        replace_backward_kernel[(parts,)](dy, dx, slots, T, D, ctx.p, ctx.seed, parts, BLOCK=BLOCK)
        if needs[1]:
            sum_slots_kernel[(triton.cdiv(D, 64),)](slots, de, parts, D, SLOTS=32, BLOCK=64)
        return dx if needs[0] else None, de if needs[1] else None, None, None


def mask_tokens_autograd(x, e, p, seed):
    return MaskTokens.apply(x, e, p, seed)

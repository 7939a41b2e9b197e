"""Hard concrete gates: features are switched by a noisy gate that is exactly 0 or 1 with some probability.

Forward    t = sigmoid((log u - log(1 - u) + a_g) / beta),  a u of a seed's Philox stream for each (m, g);
           s = min(1, max(0, t (hi - lo) + lo)),  lo < 0 < 1 < hi;   y_mgc = s_mg x_mgc
Backward   dx_mgc = s_mg dy_mgc;   da_g = sum_m c_mg t (1 - t) (hi - lo) / beta sum_c x_mgc dy_mgc,
           c = 1 where s is strictly between 0 and 1, else 0: a gate that is stuck learns nothing this time

Forward schedule: a program owns (tile of rows, group), draws one gate for each of its rows, and walks the
group's features.
Backward schedule: the gates are drawn again, so neither they nor the numbers behind them are saved. dx is
local. The walk that makes it has x and dy at hand, so it adds up their product for each row; after it the
program multiplies by the gate's slope, sums its rows, and stores one number in a slot for (row tile, group).
A second kernel adds a group's slots: a has few numbers, each read by all rows.

op: hard_concrete
schedule: index_or_seed_replay, partials_then_reduce
difficulty: 3
dtypes: fp32, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


LO, HI = -0.1, 1.1
BLOCKS = {"ROWS": 32, "COLS": 64}


@triton.jit
def gate(a, rows, group, groups, seed, beta, lo, hi):
    """s of a tile of rows, and its slope in a."""
    u = tl.minimum(tl.maximum(tl.rand(seed, rows * groups + group), 1e-6), 1 - 1e-6)
    t = tl.sigmoid((tl.log(u) - tl.log(1 - u) + a) / beta)
    wide = t * (hi - lo) + lo
    inside = (wide > 0) & (wide < 1)
    s = tl.where(wide >= 1, 1.0, tl.where(inside, wide, 0.0))
    return s, tl.where(inside, t * (1 - t) * (hi - lo) / beta, 0.0)


@triton.jit
def gate_kernel(x_ptr, a_ptr, y_ptr, M, C, seed, beta, lo, hi, ROWS: tl.constexpr, COLS: tl.constexpr):
    group, groups = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s, _ = gate(tl.load(a_ptr + group).to(tl.float32), rows, group, groups, seed, beta, lo, hi)
    for start in range(0, C, COLS):
        cols = start + tl.arange(0, COLS)
        offs = (rows[:, None] * groups + group) * C + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < C)
        y = s[:, None] * tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@autodiff(inputs_require_grad=(0, 1))
def hard_concrete(x, a, seed, beta=0.66):
    """x: (M, G, C); a: (G), the gates' logits."""
    M, G, C = x.shape
    if a.shape != (G,) or beta <= 0:
        raise ValueError(f"{G} groups have gates of {tuple(a.shape)}, and beta is {beta}")
    x, y = x.contiguous(), torch.empty(x.shape, device=x.device, dtype=x.dtype)
    gate_kernel[(triton.cdiv(M, BLOCKS["ROWS"]), G)](x, a.contiguous(), y, M, C, seed, beta, LO, HI, **BLOCKS)
    return y


@triton.jit
def noise_kernel(out_ptr, n, seed, BLOCK: tl.constexpr):
    """log u - log(1 - u) alone, for the reference."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    u = tl.minimum(tl.maximum(tl.rand(seed, offs), 1e-6), 1 - 1e-6)
    tl.store(out_ptr + offs, tl.log(u) - tl.log(1 - u), mask=offs < n)


def reference(x, a, seed, beta=0.66):
    noise = torch.empty(x.shape[:2], device=x.device)
    noise_kernel[(triton.cdiv(noise.numel(), 256),)](noise, noise.numel(), seed, BLOCK=256)
    wide = torch.sigmoid((noise + a) / beta) * (HI - LO) + LO
    s = torch.where(wide >= 1, 1.0, torch.where(wide > 0, wide, 0.0))
    return s[:, :, None] * x


SWEEP = [{"M": 16384, "G": 32, "C": 128}, {"M": 5003, "G": 12, "C": 300}]
SWEEP_CPU = [{"M": 31, "G": 14, "C": 3}, {"M": 70, "G": 2, "C": 100}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["M"], dims["G"], dims["C"], device=device, dtype=dtype)
    return (x, torch.randn(dims["G"], device=device, dtype=dtype)), {"seed": 20}


# ---- backward ----


@triton.jit
def gate_backward_kernel(
    x_ptr, a_ptr, dy_ptr, dx_ptr, slots_ptr, M, C, seed, beta, lo, hi, ROWS: tl.constexpr, COLS: tl.constexpr
):
    group, groups = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s, slope = gate(tl.load(a_ptr + group).to(tl.float32), rows, group, groups, seed, beta, lo, hi)
    ds = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, C, COLS):
        cols = start + tl.arange(0, COLS)
        offs = (rows[:, None] * groups + group) * C + cols[None, :]
        mask = (rows[:, None] < M) & (cols[None, :] < C)
        dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        ds += tl.sum(dy * tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32), axis=1)
        tl.store(dx_ptr + offs, (s[:, None] * dy).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(slots_ptr + tl.program_id(0) * groups + group, tl.sum(ds * slope, axis=0))


@triton.jit
def sum_slots_kernel(slots_ptr, da_ptr, count, BLOCK: tl.constexpr):
    group, groups = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, count, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        total += tl.load(slots_ptr + slot * groups + group, mask=slot < count, other=0.0)
    tl.store(da_ptr + group, tl.sum(total, axis=0).to(da_ptr.dtype.element_ty))


class HardConcrete(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, seed, beta):
        x, a = x.contiguous(), a.contiguous()
        ctx.save_for_backward(x, a)
        ctx.constants = seed, beta, LO, HI
        return hard_concrete(x, a, seed, beta)

    @staticmethod
    def backward(ctx, dy):
        x, a = ctx.saved_tensors
        (M, G, C), needs = x.shape, ctx.needs_input_grad
        count = triton.cdiv(M, BLOCKS["ROWS"])
        dx, da = torch.empty_like(x), torch.empty_like(a)
        slots = torch.empty((count, G), device=x.device, dtype=torch.float32)
        gate_backward_kernel[(count, G)](x, a, dy.contiguous(), dx, slots, M, C, *ctx.constants, **BLOCKS)
        if needs[1]:
            sum_slots_kernel[(G,)](slots, da, count, BLOCK=128)
        return dx if needs[0] else None, da if needs[1] else None, None, None


def hard_concrete_autograd(x, a, seed, beta=0.66):
    return HardConcrete.apply(x, a, seed, beta)

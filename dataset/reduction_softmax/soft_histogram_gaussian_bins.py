"""Soft histogram: every sample counts in every bin, by a Gaussian of its distance to the bin's centre.

Forward    k_ib = exp(-(x_i - c_b)^2 / (2 s^2)),   h_b = sum_i k_ib;   x (N), c (B)
Backward   q_ib = dh_b k_ib (c_b - x_i) / s^2:   dx_i = sum_b q_ib,   dc_b = -sum_i q_ib

Forward schedule: bins are few and samples many, so a program has all bins beside a tile of samples, (samples,
bins) numbers that exist in registers alone; G programs walk the samples and store their own histogram, which
a second kernel adds. Owners of bins would be too few for a GPU.
Backward schedule: x's gradient sums the tile q along bins, c's along samples: a program that has made the
tile has both, by two reductions, and an exp is made once where two owners would make it twice. dx is complete
and stored at once; a program carries its share of dc lane by lane over its samples, to a slot, as in the
forward. If only one of the two is wanted, the other falls away at compile time.

op: soft_histogram
schedule: recompute_from_stats, partials_then_reduce
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


MAX_GROUPS = 512  # some four programs a multiprocessor


def tiling(N, B):
    """Tiles of samples by all bins, and the number of programs."""
    BLOCK_B = triton.next_power_of_2(B)
    BLOCK_I = max(1, min(64, 4096 // BLOCK_B))
    return {"BLOCK_I": BLOCK_I, "BLOCK_B": BLOCK_B}, min(triton.cdiv(N, BLOCK_I), MAX_GROUPS)


@triton.jit
def distances(x_ptr, c, i, b, N, B, s):
    """(c_b - x_i) / s of a tile, and k; k is 0 outside."""
    x = tl.load(x_ptr + i, mask=i < N, other=0.0).to(tl.float32)
    u = (c[None, :] - x[:, None]) / s
    return u, tl.where((i[:, None] < N) & (b[None, :] < B), tl.exp(-0.5 * u * u), 0.0)


@triton.jit
def histogram_kernel(x_ptr, c_ptr, slots_ptr, N, B, s, BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr):
    pid, G = tl.program_id(0), tl.num_programs(0)
    b = tl.arange(0, BLOCK_B)
    c = tl.load(c_ptr + b, mask=b < B, other=0.0).to(tl.float32)
    h = tl.zeros([BLOCK_I, BLOCK_B], dtype=tl.float32)
    for start in range(pid * BLOCK_I, N, G * BLOCK_I):
        _, k = distances(x_ptr, c, start + tl.arange(0, BLOCK_I), b, N, B, s)
        h += k
    tl.store(slots_ptr + pid * B + b, tl.sum(h, axis=0), mask=b < B)


@triton.jit
def sum_slots_kernel(slots_ptr, out_ptr, G, B, BLOCK_G: tl.constexpr, BLOCK_B: tl.constexpr):
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    total = tl.zeros([BLOCK_G, BLOCK_B], dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        mask = (g[:, None] < G) & (b[None, :] < B)
        total += tl.load(slots_ptr + g[:, None] * B + b[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + b, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=b < B)


def sum_slots(slots, dtype):
    G, B = slots.shape
    out = torch.empty(B, device=slots.device, dtype=dtype)
    sum_slots_kernel[(triton.cdiv(B, 16),)](slots, out, G, B, BLOCK_G=64, BLOCK_B=16)
    return out


@autodiff(inputs_require_grad=(0, 1))
def soft_histogram(x, c, s):
    """x: (N), below 2^31 samples; c: (B), at most 2048 centres; s: the width. Gives (B) in float32."""
    (N,), (B,) = x.shape, c.shape
    if not 1 <= B <= 2048 or N >= 2**31 or s <= 0:
        raise ValueError(f"{N} samples, {B} bins of width {s}")
    tiles, G = tiling(N, B)
    slots = torch.empty((G, B), device=x.device, dtype=torch.float32)
    histogram_kernel[(G,)](x.contiguous(), c.contiguous(), slots, N, B, s, **tiles)
    return sum_slots(slots, torch.float32)


def reference(x, c, s):
    return torch.exp(-0.5 * ((x[:, None] - c) / s).pow(2)).sum(0)


SWEEP = [{"N": 1000000, "B": 64}, {"N": 250007, "B": 200}]
SWEEP_CPU = [{"N": 150, "B": 13}, {"N": 700, "B": 3}]


def make_args(dims, device="cuda", dtype=torch.float32):
    x = torch.randn(dims["N"], device=device, dtype=dtype)
    return x, torch.linspace(-2, 2, dims["B"], device=device).to(dtype), 0.5


# ---- backward ----


@triton.jit
def histogram_backward_kernel(
    x_ptr, c_ptr, dh_ptr, dx_ptr, slots_ptr, N, B, s,
    WANT_X: tl.constexpr, WANT_C: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    pid, G = tl.program_id(0), tl.num_programs(0)
    b = tl.arange(0, BLOCK_B)
    c = tl.load(c_ptr + b, mask=b < B, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + b, mask=b < B, other=0.0)
    dc = tl.zeros([BLOCK_I, BLOCK_B], dtype=tl.float32)
    for start in range(pid * BLOCK_I, N, G * BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        u, k = distances(x_ptr, c, i, b, N, B, s)
        q = tl.where(k > 0, dh[None, :] * k * u / s, 0.0)  # u may be infinite where k is 0
        if WANT_X:
            tl.store(dx_ptr + i, tl.sum(q, axis=1).to(dx_ptr.dtype.element_ty), mask=i < N)
        if WANT_C:
            dc -= q
    if WANT_C:
        tl.store(slots_ptr + pid * B + b, tl.sum(dc, axis=0), mask=b < B)


class SoftHistogram(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, c, s):
        x, c = x.contiguous(), c.contiguous()
        ctx.save_for_backward(x, c)
        ctx.s = s
        return soft_histogram(x, c, s)

    @staticmethod
    def backward(ctx, dh):
        x, c = ctx.saved_tensors
        (N,), (B,), needs = x.shape, c.shape, ctx.needs_input_grad
        tiles, G = tiling(N, B)
        dx, slots = torch.empty_like(x), torch.empty((G, B), device=x.device, dtype=torch.float32)
        histogram_backward_kernel[(G,)](
            x, c, dh.contiguous(), dx, slots, N, B, ctx.s, WANT_X=needs[0], WANT_C=needs[1], **tiles
        )
        return dx if needs[0] else None, sum_slots(slots, c.dtype) if needs[1] else None, None


def soft_histogram_autograd(x, c, s):
    return SoftHistogram.apply(x, c, s)

"""Rotary position for packed sequences of queries and cached keys: each starts at an offset of its own.

Forward    row i of sequence b has the position p = i - begin_b + start_b;  pair d of a head, (d, d + D / 2),
           turns by a = p base^(-2d/D):   y1 = x1 cos a - x2 sin a,  y2 = x2 cos a + x1 sin a
Backward   dx1 = dy1 cos a + dy2 sin a,  dx2 = dy2 cos a - dy1 sin a with the same positions

Forward schedule: a program owns a tile of packed rows, for all heads, one head at a time: finding a row's
sequence by bisection of the offsets and asking for sines and cosines is done once a row, and every head uses
them from registers. start_b is how many tokens of the sequence were there before, as in chunks of a prompt.
Backward schedule: the same program, told the other sign. Positions are not saved but found again, in as many
loads as the number of sequences has bits, which the offsets' cache lines serve; nothing of the size of a row
is kept for the backward.

op: rope_varlen
schedule: same_tile_pointwise, recompute_from_stats
difficulty: 2
dtypes: fp32, fp16, bf16
"""

import math

import torch
import triton
import triton.language as tl


def autodiff(inputs_require_grad=()):  # marks the stub for kernel-agent
    return lambda stub: stub


@triton.jit
def rope_varlen_kernel(
    x_ptr, offsets_ptr, start_ptr, y_ptr, rows, B, H, HALF, log2_step,
    SIGN: tl.constexpr, BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    b = tl.zeros([BLOCK_R], dtype=tl.int64)
    for bit in tl.static_range(BITS):  # the last sequence that begins at i or before
        later = b + (1 << (BITS - 1 - bit))
        begin = tl.load(offsets_ptr + later, mask=later < B, other=0)
        b = tl.where((later < B) & (begin <= i), later, b)
    begin = tl.load(offsets_ptr + b, mask=i < rows, other=0)
    position = (i - begin + tl.load(start_ptr + b, mask=i < rows, other=0)).to(tl.float32)
    angle = position[:, None] * tl.exp2(-log2_step * d.to(tl.float32))[None, :]
    c, s = tl.cos(angle), SIGN * tl.sin(angle)
    mask = (i[:, None] < rows) & (d[None, :] < HALF)
    for h in range(H):
        offs = (i[:, None] * H + h) * (2 * HALF) + d[None, :]
        x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + offs, (x1 * c - x2 * s).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + offs + HALF, (x2 * c + x1 * s).to(y_ptr.dtype.element_ty), mask=mask)


def turn(x, offsets, start, base, sign):
    (rows, H, D), B = x.shape, offsets.numel() - 1
    if D % 2 or start.shape != (B,):
        raise ValueError(f"a head of {D} channels has no halves, or {start.numel()} starts are not {B}")
    y = torch.empty_like(x)
    rope_varlen_kernel[(triton.cdiv(rows, 8),)](
        x, offsets, start, y, rows, B, H, D // 2, 2 * math.log2(base) / max(2, D),
        SIGN=sign, BITS=(B - 1).bit_length(), BLOCK_R=8, BLOCK_D=max(1, triton.next_power_of_2(D // 2)),
    )  # fmt: skip
    return y


@autodiff(inputs_require_grad=(0,))
def rope_varlen(x, offsets, start, base=10000.0):
    """x: (rows, H, D), D even; offsets: int64 (B + 1), from 0 to rows, not decreasing; start: int64 (B), the
    position of each sequence's first row."""
    return turn(x.contiguous(), offsets.contiguous(), start.contiguous(), base, 1)


def reference(x, offsets, start, base=10000.0):
    rows, _, D = x.shape
    lengths = offsets.diff()
    first = torch.repeat_interleave(start - offsets[:-1], lengths)
    position = (torch.arange(rows, device=x.device) + first).to(x.dtype)
    frequency = base ** (-2 * torch.arange(D // 2, device=x.device, dtype=x.dtype) / max(2, D))
    angle = (position[:, None] * frequency)[:, None, :]
    x1, x2 = x.chunk(2, dim=-1)
    c, s = angle.cos(), angle.sin()
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


SWEEP = [{"B": 32, "L": 1024, "H": 16, "half": 64}, {"B": 301, "L": 99, "H": 5, "half": 40}]
SWEEP_CPU = [{"B": 4, "L": 14, "H": 2, "half": 8}, {"B": 9, "L": 6, "H": 3, "half": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    lengths = torch.randint(0, dims["L"] + 1, (dims["B"],), device=device)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    x = torch.randn(int(offsets[-1]), dims["H"], 2 * dims["half"], device=device, dtype=dtype)
    return x, offsets, torch.randint(0, 2048, (dims["B"],), device=device)


# ---- backward ----


class RopeVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, offsets, start, base):
        offsets, start = offsets.contiguous(), start.contiguous()
        ctx.save_for_backward(offsets, start)
        ctx.base = base
        return rope_varlen(x, offsets, start, base)

    @staticmethod
    def backward(ctx, dy):
        return turn(dy.contiguous(), *ctx.saved_tensors, ctx.base, -1), None, None, None


def rope_varlen_autograd(x, offsets, start, base=10000.0):
    return RopeVarlen.apply(x, offsets, start, base)

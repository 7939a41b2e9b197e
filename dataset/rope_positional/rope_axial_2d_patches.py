"""Rotary position in two axes for patches of an image: half of a head turns by row, half by column.

Forward    head channels are [r1, r2, c1, c2], quarters of D / 4; the patch at (i, j) of a grid of width W
           turns the pair (r1_d, r2_d) by i f_d and (c1_d, c2_d) by j f_d,  f_d = base^(-4d/D):
           z1 = x1 cos a - x2 sin a,  z2 = x2 cos a + x1 sin a
Backward   each pair is turned back: dx1 = dz1 cos a + dz2 sin a,  dx2 = dz2 cos a - dz1 sin a

Forward schedule: a program owns a tile of rows, (image, patch, head) flattened, with both halves: lanes are
the D / 2 pairs, and a comparison decides whether a pair goes by row or by column. Row and column come from
the patch's number by a division; there are no tables, and a grid of another shape needs no new ones.
Backward schedule: the same program with the sine's sign flipped. The angle depends only on where a number is,
so nothing is saved and dy is read, turned and stored once.

op: rope_2d
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
def rope_2d_kernel(
    x_ptr, y_ptr, rows, PATCHES, WIDTH, HEADS, QUARTER, log2_step,
    SIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    pair = tl.arange(0, BLOCK_D)
    by_column = pair >= QUARTER
    d = tl.where(by_column, pair - QUARTER, pair)
    patch = row // HEADS % PATCHES
    i, j = (patch // WIDTH).to(tl.float32), (patch % WIDTH).to(tl.float32)
    place = tl.where(by_column[None, :], j[:, None], i[:, None])
    angle = place * tl.exp2(-log2_step * d.to(tl.float32))[None, :]
    c, s = tl.cos(angle), SIGN * tl.sin(angle)
    first = row[:, None] * (4 * QUARTER) + tl.where(by_column, 2 * QUARTER, 0)[None, :] + d[None, :]
    mask = (row[:, None] < rows) & (pair[None, :] < 2 * QUARTER)
    x1 = tl.load(x_ptr + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + first + QUARTER, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + first, (x1 * c - x2 * s).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + first + QUARTER, (x2 * c + x1 * s).to(y_ptr.dtype.element_ty), mask=mask)


def turn(x, width, base, sign):
    B, patches, H, D = x.shape
    if D % 4 or width < 1:
        raise ValueError(f"a head of {D} channels has no quarters, or a grid of width {width} no columns")
    y = torch.empty_like(x)
    rope_2d_kernel[(triton.cdiv(B * patches * H, 16),)](
        x, y, B * patches * H, patches, width, H, D // 4, 4 * math.log2(base) / max(4, D),
        SIGN=sign, BLOCK_R=16, BLOCK_D=max(1, triton.next_power_of_2(D // 2)),
    )  # fmt: skip
    return y


@autodiff(inputs_require_grad=(0,))
def rope_2d(x, width, base=100.0):
    """x: (B, rows width, H, D), patches row by row, D a multiple of 4."""
    return turn(x.contiguous(), width, base, 1)


def reference(x, width, base=100.0):
    patches, D = x.shape[1], x.shape[3]
    patch = torch.arange(patches, device=x.device)
    frequency = base ** (-4 * torch.arange(D // 4, device=x.device, dtype=x.dtype) / max(4, D))
    halves = []
    for half, place in zip(x.chunk(2, dim=-1), (patch // width, patch % width), strict=True):
        angle = (place[:, None].to(x.dtype) * frequency)[:, None, :]
        x1, x2 = half.chunk(2, dim=-1)
        c, s = angle.cos(), angle.sin()
        halves += [x1 * c - x2 * s, x2 * c + x1 * s]
    return torch.cat(halves, dim=-1)


SWEEP = [
    {"B": 32, "Y": 32, "X": 32, "H": 16, "Q": 16},
    {"B": 5, "Y": 37, "X": 51, "H": 12, "Q": 18},
]
SWEEP_CPU = [{"B": 2, "Y": 5, "X": 7, "H": 2, "Q": 8}, {"B": 1, "Y": 3, "X": 4, "H": 5, "Q": 5}]


def make_args(dims, device="cuda", dtype=torch.float32):
    """Q: a quarter of the head dimension."""
    patches = dims["Y"] * dims["X"]
    x = torch.randn(dims["B"], patches, dims["H"], 4 * dims["Q"], device=device, dtype=dtype)
    return x, max(1, dims["X"])


# ---- backward ----


class Rope2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width, base):
        ctx.options = width, base
        return rope_2d(x, width, base)

    @staticmethod
    def backward(ctx, dy):
        return turn(dy.contiguous(), *ctx.options, -1), None, None


def rope_2d_autograd(x, width, base=100.0):
    return Rope2d.apply(x, width, base)
